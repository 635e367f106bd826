"""How long each part of a compile of GPT-2 small takes, cold."""

import time

from appliance.compiler.pipeline import PASSES, Half, Precision, Stages, Target
from benchmarks.show import show
from benchmarks.traced import trace_gpt2
from waferbox.cirh.text.parser import parse_module


def measure() -> dict[str, float]:
    """Seconds by part, in order."""
    traced = trace_gpt2()
    seconds = dict(traced.seconds)
    begin = time.perf_counter()

    def mark(part: str) -> None:
        nonlocal begin
        now = time.perf_counter()
        seconds[part], begin = now - begin, now

    module = parse_module(traced.text)
    mark("parse")
    for step in PASSES:
        step.run(module)
        mark(step.name)
    target = Target(num_csx=1, num_shards=1, precision=Precision(half=Half.BFLOAT16))
    stages = Stages(module, target)
    _ = stages.sharding
    mark("casts and sharding")
    _ = stages.cut
    mark("cut")
    _ = stages.plan
    mark("layers, schedules, memory")
    return seconds


def bench() -> None:
    print("compile of GPT-2 small, cold, bfloat16, one wafer")
    seconds = measure()
    for part, value in seconds.items():
        show(part, [value], "s")
    show("all of it", [sum(seconds.values())], "s")
