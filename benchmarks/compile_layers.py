"""How the time and memory of a compile grow with the number of layers.

    python -m benchmarks.compile_layers [LAYERS]

A GPT of width 1,024 with eight sequences of 2,048 tokens, AdamW and bfloat16, for one wafer with 44 GB, traced and
compiled in one process for each number of layers. With a number of layers, prints its figures as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Final

from appliance.compiler.core.target import Half, MicroBatching, Precision, Target
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.pipelined.regions import NOMINAL
from benchmarks.gpt import GPTSettings
from benchmarks.large_gpt import peak_bytes, trace_without_weights
from benchmarks.runs import run_for_result

LAYERS: Final = (12, 24, 48, 96)
ROWS: Final = 8
MEMORY_BYTES: Final = 44 * 10**9
SECONDS: Final = 600.0


def measure(layers: int) -> dict[str, float]:
    """Seconds of a processor of trace and compile, and the most memory after each."""
    settings = GPTSettings(vocabulary=50257, width=1024, layers=layers, heads=16, sequence=2048)
    traced = trace_without_weights(settings, ROWS)[1]
    trace_bytes, begin = peak_bytes(), time.process_time()
    precision = Precision(half=Half.BFLOAT16)
    target = Target(num_csx=1, num_shards=1, precision=precision, wafer_memory_bytes=MEMORY_BYTES)
    compile_in_micro_batches(traced.text, target, MicroBatching(), lambda: NOMINAL)
    return {
        "trace_seconds": sum(traced.seconds.values()),
        "compile_seconds": time.process_time() - begin,
        "trace_bytes": trace_bytes,
        "bytes": peak_bytes(),
    }


def bench() -> None:
    print("trace and compile of a GPT of width 1,024, one wafer, bfloat16, by the number of layers")
    print(f"  {'layers':>6}  {'trace':>8}  {'compile':>8}  {'a layer more':>12}  {'trace':>8}  {'and compile':>11}")
    before: tuple[int, float] | None = None
    for layers in LAYERS:
        command = [sys.executable, "-m", "benchmarks.compile_layers", str(layers)]
        found: Mapping[str, float] = run_for_result(command, os.environ, SECONDS)
        seconds = found["trace_seconds"] + found["compile_seconds"]
        more = "" if before is None else f"{(seconds - before[1]) / (layers - before[0]):.2f} s"
        before = layers, seconds
        print(
            f"  {layers:6}  {found['trace_seconds']:6.1f} s  {found['compile_seconds']:6.1f} s  {more:>12}  "
            f"{found['trace_bytes'] / 1e9:5.2f} GB  {found['bytes'] / 1e9:8.2f} GB",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(int(sys.argv[1]))))
    else:
        bench()
