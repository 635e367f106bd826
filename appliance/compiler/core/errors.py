"""What a compile can find wrong with a module."""

from xdsl.ir import Operation

from waferbox.cirh.dialect.locations import source_of


class CompileError(ValueError):
    """The module cannot be compiled for the target. The message names the operation, the user's line, and a way out."""


class WaferMemoryError(CompileError):
    """The step does not fit a wafer. fitting_share: of the rows that a wafer has at once, about so many would."""

    def __init__(self, message: str, fitting_share: float) -> None:
        super().__init__(message)
        self.fitting_share = fitting_share


def refuse(op: Operation, why: str, way_out: str) -> CompileError:
    """The error for one operation."""
    return CompileError(f"{source_of(op)}: {op.name} {why}; {way_out}")
