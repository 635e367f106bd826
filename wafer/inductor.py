"""Kernels that Inductor generates: the operations of a layer joined to few loops. They take seconds each to build."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from cirh.kernel import Kernel
from interconnect.folders import cache_root


class InductorKernel:
    """Called as cirh.kernel.Kernel is, and gives the same up to rounding."""

    def __init__(self, kernel: Kernel) -> None:
        """Compiled here, or found in the cache where it was compiled before."""
        # Read when Inductor is imported: a second of imports, for those alone who want it.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "inductor"))
        import torch._inductor
        import torch._inductor.config
        from torch.fx.experimental.proxy_tensor import make_fx

        examples: list[Any] = [torch.empty(type.shape, dtype=type.dtype) for type in kernel.inputs]

        def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
            return kernel(inputs)

        graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
        # In this process: workers of its own would outlive a wafer that is killed.
        with torch._inductor.config.patch(compile_threads=1):
            self._compiled: Any = torch._inductor.compile(graph, examples)

    def __call__(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The results; where `out[i]` is given, result i is copied to it."""
        results: list[torch.Tensor] = list(self._compiled(*inputs))
        for index, place in enumerate(out):
            if place is not None:
                results[index] = place.copy_(results[index])
        return results
