"""Errors of a compile."""

from xdsl.ir import Operation

from waferbox.cirh.dialect.locations import source_of


class CompileError(ValueError):
    """Raised if a module cannot be compiled for the target.

    The message names the operation, the user's line, and a way out.
    """


class BatchError(CompileError):
    """Raised if the rows of a batch cannot be divided evenly over the wafers."""


class WaferMemoryError(CompileError):
    """Raised if the step does not fit a wafer. fitting_share: about the share of a wafer's rows that would fit."""

    def __init__(self, message: str, fitting_share: float) -> None:
        super().__init__(message)
        self.fitting_share = fitting_share


def refuse(op: Operation, why: str, way_out: str) -> CompileError:
    """The error for an operation that cannot be compiled."""
    return CompileError(f"{source_of(op)}: {op.name} {why}; {way_out}")
