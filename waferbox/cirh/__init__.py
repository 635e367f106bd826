"""CIRH: the tensor program of one training step, as xDSL operations and as text.

A module holds one flat function of static shapes. Operations are `cirh.X` where the real dialect has one of that
meaning and `aten.X` verbatim otherwise; `table` says everything about each of them, with `calls` into torch that run
them. Text from the wire is parsed with limits (`text`), and nothing in it is believed before `modules.verify` has
inferred every type again. `execution` runs modules on a CPU.
"""

# --- The errors of this package ---------------------------------------------------------------------------------------


class CirhError(ValueError):
    """A module, an operation or its text is wrong. The message begins with the source location where one is known."""


class TextError(CirhError):
    """Text is wrong. The message begins with its line."""
