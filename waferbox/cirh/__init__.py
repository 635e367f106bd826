"""CIRH: the tensor program of one training step, as xDSL operations and as text.

A module holds one flat function of static shapes. Operations are `cirh.X` where the real dialect has one of that
meaning, and otherwise `aten.X` verbatim. `table` specifies each of them, and `calls` prepares the torch calls that run
them. `text` parses text from the wire with limits, and `modules.verify` infers every type again before a module is
used. `execution` runs modules on a CPU.
"""

# --- Errors -----------------------------------------------------------------------------------------------------------


class CirhError(ValueError):
    """Raised for a wrong module, operation or text. The message begins with the source location where it is known."""


class TextError(CirhError):
    """Raised for wrong text. The message begins with the line."""
