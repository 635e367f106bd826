"""cstorch.utils.utils, and the choice of the compiler of release 1.9."""

from cstorch._internal.generations import inherit

__all__ = ["is_ltc_mlir_mode_enabled"]

__getattr__ = inherit("cerebras_pytorch.utils.utils", "cstorch.utils.utils")


def is_ltc_mlir_mode_enabled() -> bool:
    """Returns True: scripts then use `cerebras_pytorch.experimental`."""
    return True
