"""Kernels of simulated roles: most of a plan's are those of the plan before."""

from functools import lru_cache

from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.text.parser import shared_module


@lru_cache(maxsize=512)
def built_kernel(text: str) -> Kernel:
    """The kernel that has this text. It keeps nothing but the places of results, so whoever has it may run it."""
    return Kernel.build(shared_module(text))
