"""Products of float32 matrices by MKL, which torch takes, and by oneDNN, one thread each, in turns.

Then products of halves by torch, and by way of float32.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from benchmarks.show import show_pairs
from waferbox.cirh.calls.products import is_by_float32, onednn_is_faster

# Rows, inner dimension, columns: the layers of FC and of GPT-2 small, forward and as the gradient of a weight.
SHAPES: Final = (
    (64, 784, 256),
    (256, 64, 784),
    (64, 256, 256),
    (64, 256, 32),
    (1024, 768, 768),
    (768, 1024, 3072),
    (1024, 3072, 768),
)
HALF_SHAPE: Final = (256, 768, 768)
FLOPS: Final = 4e9  # of a measurement


def bench(repeats: int) -> None:
    torch.set_num_threads(1)
    print(f"float32 products, one thread; layers here are multiplied by {'oneDNN' if onednn_is_faster() else 'MKL'}")
    for rows, inner, columns in SHAPES:
        a, b = torch.randn(rows, inner), torch.randn(columns, inner)
        flops = 2 * rows * inner * columns
        by_onednn = partial(torch.ops.mkldnn._linear_pointwise.default, a, b, None, "none", [], "")
        by_mkl = partial(torch.mm, a, b.t())
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(repeats):
            ours.append(_rate(by_onednn, flops))
            theirs.append(_rate(by_mkl, flops))
        show_pairs(f"{rows} x {inner} x {columns}, oneDNN", ours, "MKL", theirs, "GFLOP/s")
    for dtype in (torch.bfloat16, torch.float16):
        _bench_half(dtype, repeats)


def _bench_half(dtype: torch.dtype, repeats: int) -> None:
    name = str(dtype).removeprefix("torch.")
    print(f"{name} products; layers here compute them {'in float32' if is_by_float32(dtype) else 'by torch'}")
    rows, inner, columns = HALF_SHAPE
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    flops = 2 * rows * inner * columns
    by_float32: list[float] = []
    by_torch: list[float] = []
    for _ in range(repeats):
        by_float32.append(_rate(lambda: torch.mm(a.float(), b.float()).to(dtype), flops))
        by_torch.append(_rate(lambda: torch.mm(a, b), flops))
    show_pairs(f"{rows} x {inner} x {columns}, in float32", by_float32, "torch", by_torch, "GFLOP/s")


def _rate(work: Callable[[], object], flops: int) -> float:
    """Billions of operations per second."""
    count = max(3, round(FLOPS / flops))
    work()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    return count * flops / (time.perf_counter() - begin) / 1e9
