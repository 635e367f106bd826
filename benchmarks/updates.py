"""Parameters per second of AdamW's update: MemoryX's generated loop against torch's fused kernel, one thread each."""

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from appliance.compiler.pipeline import Target, compile_module
from benchmarks.show import show_pairs
from benchmarks.traced import trace_training
from waferbox.cirh.dialect.types import TensorInfo
from waferbox.cirh.text.parser import parse_module
from waferbox.host.folders import cache_root
from waferbox.lair.kernel import GeneratedKernel, generate

COPIES, ROWS, COLUMNS = 20, 3072, 768  # 47 million parameters: more than caches hold
SHAPE = (ROWS, COLUMNS)


def update_kernel() -> tuple[GeneratedKernel, list[int]]:
    """The loop that the compiler makes of a layer's AdamW, and for each result the input that it replaces."""
    batch = (torch.randn(8, COLUMNS), torch.randn(8, ROWS))
    traced = trace_training(
        nn.Linear(COLUMNS, ROWS, bias=False), lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), batch, lr=1e-3
    )
    plan = compile_module(traced.text, Target(num_csx=1, num_shards=1))
    modules = {kernel.id: parse_module(kernel.cirh) for kernel in plan.memoryx[0].kernels}
    kernels = generate(modules, cache_root() / "kernels")
    runs = [i.run for i in plan.memoryx[0].instructions if i.WhichOneof("kind") == "run"]
    (run,) = (run for run in runs if run.kernel in kernels and kernels[run.kernel].outputs[0].shape == SHAPE)
    return kernels[run.kernel], [list(run.inputs).index(state) for state in run.commits]


def seconds_of(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def bench(repeats: int) -> None:
    torch.set_num_threads(1)
    kernel, replaced = update_kernel()

    def tensor(type: TensorInfo) -> torch.Tensor:
        return torch.rand(type.shape) if type.shape == SHAPE else torch.tensor(0.5)

    inputs = [[tensor(type) for type in kernel.inputs] for _ in range(COPIES)]
    calls = [kernel.bind([given[index] for index in replaced]) for given in inputs]
    tensors = [[torch.rand(SHAPE) for _ in range(COPIES)] for _ in range(4)]
    steps = [torch.tensor(3.0) for _ in range(COPIES)]

    def ours() -> None:
        for call, given in zip(calls, inputs, strict=True):
            call(given)

    def theirs() -> None:
        parameters, gradients, means, squares = tensors
        torch._fused_adamw_(
            parameters, gradients, means, squares, [], steps,
            lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    millions = COPIES * ROWS * COLUMNS / 1e6
    measured: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        measured.append((millions / seconds_of(ours), millions / seconds_of(theirs)))
    print("updates of AdamW, one thread")
    mine, fused = zip(*measured[1:], strict=True)
    show_pairs("MemoryX's loop", mine, "torch's fused AdamW", fused, "M parameters/s")
