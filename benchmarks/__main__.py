"""`make bench`: the figures of the README, measured in pairs in one run.

Machines are shared and noisy: what counts are the ratios of paired runs, and their medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

from benchmarks import random_numbers, start_up, streams

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


def steps_per_second(side: str, threads: int, num_steps: int, lane: str = "") -> float:
    command = [
        sys.executable,
        "-m",
        "benchmarks.fc_training",
        side,
        "--threads",
        str(threads),
        "--num-steps",
        str(num_steps),
    ]
    environment = {**os.environ, **ENVIRONMENT, **({"WAFERBOX_LANE": lane} if lane else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1])["steps_per_second"])


def show(label: str, values: list[float], unit: str) -> None:
    spread = f"of {len(values)}: {min(values):.2f} to {max(values):.2f}"
    print(f"  {label:44s} {statistics.median(values):9.2f} {unit}   ({spread})", flush=True)


def bench_training(repeats: int) -> None:
    print("FC 784-256-256-10, batch 64, AdamW, one wafer; OMP_WAIT_POLICY=PASSIVE on both sides")
    trial = {threads: steps_per_second("eager", threads, 1000) for threads in (1, 2)}
    best = max(trial, key=lambda threads: trial[threads])
    print(f"  eager's best thread count is {best} ({', '.join(f'{t}: {r:.0f} steps/s' for t, r in trial.items())})")
    for lane, num_steps in (("shared_memory", 2000), ("grpc", 600)):
        eager, cluster = [], []
        for _ in range(repeats):
            eager.append(steps_per_second("eager", best, 2000))
            cluster.append(steps_per_second("cluster", 1, num_steps, lane))
        show("eager, fused AdamW", eager, "steps/s")
        show(f"cluster, {lane}", cluster, "steps/s")
        show("ratio", [c / e for c, e in zip(cluster, eager, strict=True)], "x")


def bench_start_up(repeats: int) -> None:
    print("time to first loss, from `python train.py`")
    for kind, seconds in start_up.measure(repeats).items():
        show(kind, seconds, "s")


def bench_random_numbers(repeats: int) -> None:
    print("random numbers on one thread: the cluster's and torch's own")
    for label, ours, theirs in random_numbers.measure(repeats * 5):
        show(label, ours, "ns")
        show("  time of torch's own", [a / b for a, b in zip(ours, theirs, strict=True)], "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ["training", "start-up", "streams", "random"]
    parser.add_argument("part", nargs="*", choices=[*known, []], help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    parts = options.part or known
    if "training" in parts:
        bench_training(options.repeats)
    if "start-up" in parts:
        bench_start_up(options.repeats)
    if "streams" in parts:
        streams.main()
    if "random" in parts:
        bench_random_numbers(options.repeats)


if __name__ == "__main__":
    main()
