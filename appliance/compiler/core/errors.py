"""What a compile can find wrong with a module."""

from xdsl.ir import Operation

from cirh.dialect.locations import source_of


class CompileError(ValueError):
    """The module cannot be compiled for the target. The message names the operation, the user's line, and a way out."""


def refuse(op: Operation, why: str, way_out: str) -> CompileError:
    """The error for one operation."""
    return CompileError(f"{source_of(op)}: {op.name} {why}; {way_out}")
