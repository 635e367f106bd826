"""The kernels of a wafer's plan, of the library that the plan names: torch's operations, or loops from Inductor."""

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

# --- Kernels from Inductor --------------------------------------------------------------------------------------------


CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
ROOM_BYTES: Final = 4 << 20  # with less disk space left, a failure of the compiler counts as a full disk


def inductor_cache() -> Path:
    """Returns the folder of Inductor's code, and sets the variable that Inductor reads."""
    return Path(os.environ.setdefault(CACHE_VARIABLE, str(cache_root() / "inductor")))


class InductorKernel:
    """A kernel whose operations Inductor joins to few loops, with the results of the given one up to rounding.

    Called as waferbox.cirh.execution.kernel.Kernel is. Used by one thread. Raises OSError if the cache folder has no
    room for the code.
    """

    def __init__(self, kernel: Kernel) -> None:
        """Compiles the kernel, which takes seconds, or loads its code from the cache."""
        # Inductor reads the variable when it is imported. The import takes a second, so only users of Inductor do it.
        folder = inductor_cache()
        import torch._inductor
        import torch._inductor.config
        from torch._inductor.exc import InductorError
        from torch.fx.experimental.proxy_tensor import make_fx

        self._kernel = kernel
        examples: list[Any] = [torch.empty(type.shape, dtype=type.dtype) for type in kernel.inputs]

        def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
            return kernel(inputs)

        graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
        # One thread means in this process: Inductor's compile workers would outlive a wafer that is killed.
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
        """Returns the results. Result i is copied to `out[i]` if that is given. Raises OperationFailed."""
        # The code is compiled for dense inputs, and another kernel's result may be a view of a part of a tensor.
        try:
            results: list[torch.Tensor] = list(self._compiled(*(tensor.contiguous() for tensor in inputs)))
        except Exception:
            self._kernel(tuple(inputs))  # its failure names the operation
            raise
        for index, place in enumerate(out):
            if place is not None:
                results[index] = place.copy_(results[index])
        return results


# --- The kernels of a plan --------------------------------------------------------------------------------------------


# Called with the inputs and, for each result, the tensor that it is written to, or None.
WaferKernel: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], list[torch.Tensor]]


class WaferKernels:
    """The kernels of the plan that was loaded last, which the next one reuses. Used by one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, plan_pb2.KernelLibrary.ValueType], WaferKernel] = {}

    def make(
        self, kernels: Iterable[plan_pb2.Kernel], library: "plan_pb2.KernelLibrary.ValueType"
    ) -> dict[int, WaferKernel]:
        """Returns the kernels by number. Raises CirhError for invalid text."""
        before, self._kept = self._kept, {}
        made = {}
        for kernel in kernels:
            key = kernel.cirh, library
            if key not in self._kept:
                self._kept[key] = before.get(key) or _make(*key)
            made[kernel.id] = self._kept[key]
        return made

    def release(self) -> None:
        """Drops the tensors of an execution that kernels keep."""
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
    """Whether a kernel draws random numbers, which come from a library that Inductor cannot compile."""
    return any(spec(op.name).random for op in body_ops(module) if not isinstance(op, Const))
