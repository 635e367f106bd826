"""Where the time of a wafer's kernels goes, operation by operation: what loops for element-wise work could save.

An operation that broadcasts by itself in a kernel has whole operands here, so element-wise work is rather overstated.
Memory is kept from call to call, as wafers keep it.
"""

import timeit
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Final

import torch
from torch.nn import functional as F
from xdsl.ir import Operation

from appliance.compiler.pipeline import Half, Precision, Target, compile_module
from benchmarks.fc_training import ReadyBatches, network
from benchmarks.runs import THREADS
from benchmarks.traced import trace_gpt2, trace_training
from wafer.large_tensors import limit_large_tensors
from waferbox.cirh.dialect.operations import Const, body_ops
from waferbox.cirh.dialect.types import TensorInfo, info, shape
from waferbox.cirh.table.lookup import build, runtime_operands, spec
from waferbox.cirh.text.parser import parse_module

CALLS: Final = 3  # of each operation, for each repeat
MOST_SHOWN: Final = 8
KEPT_BYTES: Final = 2 << 30
BFLOAT16: Final = Precision(half=Half.BFLOAT16)


def bench(repeats: int) -> None:
    torch.manual_seed(0)
    limit_large_tensors(KEPT_BYTES)
    fc, gpt2 = _fc(), trace_gpt2().text
    for name, text, precision in (
        ("FC 784-256-256-10, batch 64, float32", fc, None),
        ("GPT-2 small, sequence 256, batch 4, float32", gpt2, None),
        ("GPT-2 small, sequence 256, batch 4, bfloat16", gpt2, BFLOAT16),
    ):
        for threads in THREADS:
            torch.set_num_threads(threads)
            print(f"{name}: seconds of a step by operation, threads: {threads}")
            _show(_seconds(text, precision, repeats))


def _fc() -> str:
    batch = next(iter(ReadyBatches()))
    return trace_training(network(), lambda model, given: F.cross_entropy(model(given[0]), given[1]), batch).text


def _seconds(text: str, precision: Precision | None, repeats: int) -> dict[tuple[str, bool], float]:
    """Of a step: by the operation's name, and whether it goes element by element."""
    wafer = compile_module(text, Target(num_csx=1, num_shards=1, precision=precision)).wafer
    runs = Counter(i.run.kernel for i in wafer.instructions if i.HasField("run"))
    seconds: defaultdict[tuple[str, bool], float] = defaultdict(float)
    for kernel in wafer.kernels:
        for op in body_ops(parse_module(kernel.cirh)):
            if not isinstance(op, Const):
                element_wise = spec(op.name).pointwise and bool(shape(op.results[0]))
                seconds[op.name, element_wise] += runs[kernel.id] * _best(op, repeats)
    return seconds


def _best(op: Operation, repeats: int) -> float:
    operands = [_example(info(operand)) for operand in runtime_operands(op)]
    with torch.no_grad():
        return min(timeit.repeat(partial(build(op).function, *operands), number=1, repeat=CALLS * repeats))


def _example(type: TensorInfo) -> torch.Tensor:
    if type.dtype.is_floating_point:
        return torch.randn(type.shape).to(type.dtype)
    return torch.zeros(type.shape, dtype=type.dtype)


def _show(seconds: Mapping[tuple[str, bool], float]) -> None:
    whole = sum(seconds.values())
    element_wise = sum(value for (_, is_element_wise), value in seconds.items() if is_element_wise)
    for (name, _), value in sorted(seconds.items(), key=lambda item: -item[1])[:MOST_SHOWN]:
        print(f"  {name:44s} {value * 1e3:9.2f} ms   {value / whole:6.1%}")
    print(f"  {'all':44s} {whole * 1e3:9.2f} ms")
    print(f"  {'element by element':44s} {element_wise * 1e3:9.2f} ms   {element_wise / whole:6.1%}")
