"""The kernels of a wafer's plan, by the library that the plan names."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from xdsl.dialects.builtin import ModuleOp

from cirh.dialect.operations import Const, body_ops
from cirh.execution.kernel import Kernel
from cirh.modules.verify import verify
from cirh.table.lookup import spec
from cirh.text.parser import parse_module
from nodes.folders import why_not_kept
from nodes.telemetry.advice import advise
from wafer.inductor import ROOM_BYTES, InductorKernel, inductor_cache
from wsc.v1 import plan_pb2

# Inputs, and for each result the tensor that it is written to, or None.
WaferKernel: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], list[torch.Tensor]]


class WaferKernels:
    """Makes the kernels of plans, and keeps those of the last one: a plan that is loaded again has them at once."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, plan_pb2.KernelLibrary.ValueType], WaferKernel] = {}

    def make(
        self, kernels: Iterable[plan_pb2.Kernel], library: "plan_pb2.KernelLibrary.ValueType"
    ) -> dict[int, WaferKernel]:
        """The kernels under their numbers. Raises CirhError for text that is not valid."""
        before, self._kept = self._kept, {}
        made = {}
        for kernel in kernels:
            key = kernel.cirh, library
            if key not in self._kept:
                self._kept[key] = before.get(key) or _make(*key)
            made[kernel.id] = self._kept[key]
        return made

    def release(self) -> None:
        """Keep no tensors of an execution."""
        for kernel in self._kept.values():
            if isinstance(kernel, Kernel):
                kernel.release_places()


def _make(text: str, library: "plan_pb2.KernelLibrary.ValueType") -> WaferKernel:
    module = parse_module(text)
    verify(module)
    kernel = Kernel(module)
    if library == plan_pb2.KERNEL_LIBRARY_INDUCTOR and not _draws(module):
        try:
            return InductorKernel(kernel)
        except OSError as error:
            why = why_not_kept(inductor_cache(), ROOM_BYTES, error.strerror)
            advise("inductor", f"Layers run operation by operation, as Inductor's code cannot be kept in {why}")
    return kernel


def _draws(module: ModuleOp) -> bool:
    """Whether a kernel draws random numbers: they come from a library that Inductor does not know."""
    return any(spec(op.name).random for op in body_ops(module) if not isinstance(op, Const))
