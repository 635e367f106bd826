"""Kernels that Inductor generates: the operations of a layer joined to few loops. They take seconds each to build."""

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from cirh.execution.kernel import Kernel
from nodes.folders import cache_root

CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
ROOM_BYTES: Final = 4 << 20  # with less, a compiler that fails is taken to have failed for it


def inductor_cache() -> Path:
    """Where Inductor keeps its code, without which it does nothing."""
    return Path(os.environ.setdefault(CACHE_VARIABLE, str(cache_root() / "inductor")))


class InductorKernel:
    """Called as cirh.execution.kernel.Kernel is, and gives the same up to rounding."""

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
