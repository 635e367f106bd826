"""cstorch.utils.utils, and which compiler release 1.9 is to use."""

from cstorch._internal.generations import inherit

__all__ = ["is_ltc_mlir_mode_enabled"]

__getattr__ = inherit("cerebras_pytorch.utils.utils", "cstorch.utils.utils")


def is_ltc_mlir_mode_enabled() -> bool:
    """True: scripts are to go the way of `cerebras_pytorch.experimental`."""
    return True
