"""The kernels of a wafer's plan, by the library that the plan names: torch's operations, or loops that Inductor
generates.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from xdsl.dialects.builtin import ModuleOp

from waferbox.cirh.dialect.operations import Const, body_ops
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.table.lookup import spec
from waferbox.cirh.text.parser import parse_module
from waferbox.host.folders import cache_root, why_not_kept
from waferbox.runtime.logs import advise
from wsc.v1 import plan_pb2

# ----------------------------------------------------------------------------------------------------------------------
# Kernels that Inductor generates: the operations of a layer joined to few loops. They take seconds each to build


CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
ROOM_BYTES: Final = 4 << 20  # with less, a compiler that fails is taken to have failed for it


def inductor_cache() -> Path:
    """Where Inductor keeps its code, without which it does nothing."""
    return Path(os.environ.setdefault(CACHE_VARIABLE, str(cache_root() / "inductor")))


class InductorKernel:
    """Called as waferbox.cirh.execution.kernel.Kernel is, and gives the same up to rounding."""

    def __init__(self, kernel: Kernel) -> None:
        """Compiled here, or found in the cache where it was compiled before. Raises OSError: that has no room."""
        # Named before Inductor is imported, which reads it: a second of imports, for those alone who want it.
        folder = inductor_cache()
        import torch._inductor
        import torch._inductor.config
        from torch._inductor.exc import InductorError
        from torch.fx.experimental.proxy_tensor import make_fx

        examples: list[Any] = [torch.empty(type.shape, dtype=type.dtype) for type in kernel.inputs]

        def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
            return kernel(inputs)

        graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
        # In this process: workers of its own would outlive a wafer that is killed.
        with torch._inductor.config.patch(compile_threads=1):
            try:
                self._compiled: Any = torch._inductor.compile(graph, examples)
            except InductorError as error:
                if isinstance(error.inner_exception, OSError):
                    raise error.inner_exception from None
                if shutil.disk_usage(folder).free < ROOM_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                raise

    def __call__(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The results; where `out[i]` is given, result i is copied to it."""
        # The code is for dense inputs. A part of a tensor, as another kernel may give, is copied.
        results: list[torch.Tensor] = list(self._compiled(*(tensor.contiguous() for tensor in inputs)))
        for index, place in enumerate(out):
            if place is not None:
                results[index] = place.copy_(results[index])
        return results


# --- The kernels of a wafer's plan, by the library that the plan names ------------------------------------------------


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
                kernel.release_destinations()


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
