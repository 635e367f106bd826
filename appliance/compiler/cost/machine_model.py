"""The rates of this machine from which times are predicted, measured once and stored."""

import contextlib
import dataclasses
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from xdsl.ir import Operation

from appliance.compiler.cost.flops import flops, is_product, moved_bytes
from waferbox.cirh.calls.products import multiplies_bfloat16, onednn_is_faster
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.spec import Site
from waferbox.cirh.dialect.types import TensorInfo
from waferbox.cirh.table.lookup import spec
from waferbox.host.folders import write_whole

FILE: Final = "machine.json"
_SIDE: Final = 512  # side of the matrices that are multiplied
_ELEMENTS: Final = 4 << 20  # elements of the vectors that are added: more than caches hold
_CALLS: Final = 2000
_REPEATS: Final = 7
# A message over shared memory from MemoryX through SwarmX to a wafer or back, which are two hops.
_MESSAGE_SECONDS: Final = 35e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineModel:
    """The rates of one thread.

    Attributes:
        source: where the rates come from.
        float32_flops_per_second: rate of products of float32.
        half_flops_per_second: rate of products of bfloat16 and float16.
        bytes_per_second: rate of element-wise work, in bytes read and written.
        stream_bytes_per_second: rate of messages between MemoryX and a wafer.
        operation_seconds: time of an operation on an empty tensor.
        message_seconds: time of an empty message.
    """

    source: str
    float32_flops_per_second: float
    half_flops_per_second: float
    bytes_per_second: float
    stream_bytes_per_second: float
    operation_seconds: float
    message_seconds: float

    def operation_time(self, op: Operation) -> float:
        """Predicted seconds of an operation: those of its arithmetic or of its bytes, whichever are more."""
        nbytes = moved_bytes(op)
        if not nbytes:
            return 0.0
        seconds = nbytes / self.bytes_per_second
        if is_product(op):
            half = types.dtype(op.operands[0]).itemsize == 2
            rate = self.half_flops_per_second if half else self.float32_flops_per_second
            seconds = max(seconds, flops(op) / rate)
        return self.operation_seconds + seconds

    def message_time(self, nbytes: int) -> float:
        """Predicted seconds of a message."""
        return self.message_seconds + nbytes / self.stream_bytes_per_second


def machine_model(folder: Path) -> MachineModel:
    """The model of this machine: read from the folder, or measured (within a second) and stored there."""
    path = folder / FILE
    name = _machine()
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        kept = MachineModel(**json.loads(path.read_text()))
        if kept.source.startswith(name) and all(
            isinstance(rate, float) and rate > 0 for rate in dataclasses.astuple(kept)[1:]
        ):
            return kept
    model = _measure(name)
    with contextlib.suppress(OSError):  # if it cannot be stored, it is measured again next time
        write_whole(path, json.dumps(dataclasses.asdict(model), indent=1).encode())
    return model


def _machine() -> str:
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    library = "oneDNN" if onednn_is_faster() else "torch's own library"
    halves = "" if multiplies_bfloat16() else ", of bfloat16 in float32"
    return f"measured on {processor}, torch {torch.__version__}, products by {library}{halves}, one thread"


def _measure(name: str) -> MachineModel:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            vectors = [torch.ones(_ELEMENTS) for _ in range(3)]
            nbytes = vectors[0].nbytes
            one = torch.ones(1)
            return MachineModel(
                source=name,
                float32_flops_per_second=_products_per_second(torch.float32),
                half_flops_per_second=_products_per_second(torch.bfloat16),
                bytes_per_second=3 * nbytes / _best(lambda: torch.add(vectors[0], vectors[1], out=vectors[2])),
                stream_bytes_per_second=nbytes / _best(lambda: vectors[2].copy_(vectors[0])),
                operation_seconds=_best(lambda: [torch.add(one, one) for _ in range(_CALLS)]) / _CALLS,
                message_seconds=_MESSAGE_SECONDS,
            )
    finally:
        torch.set_num_threads(threads)


def _products_per_second(dtype: torch.dtype) -> float:
    left, right = torch.ones(_SIDE, _SIDE, dtype=dtype), torch.ones(_SIDE, _SIDE, dtype=dtype)
    operands = (TensorInfo((_SIDE, _SIDE), dtype),) * 2
    product = spec("cirh.MatMul").prepare(Site("cirh.MatMul", operands)).function
    return float(2 * _SIDE**3 / _best(lambda: product(left, right)))


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs, after one that is not measured."""
    work()
    best = float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best
