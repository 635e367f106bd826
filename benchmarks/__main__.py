"""`make bench`: the figures of the README, measured in pairs in one run.

Machines are shared and noisy: what counts are the ratios of paired runs, and their medians.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import (
    checkpoints,
    compile_layers,
    compile_stages,
    deaths,
    hosts,
    initialisation,
    larger_than_memory,
    memory,
    micro_batches,
    nodes,
    operations,
    pipelined,
    prediction,
    products,
    random_numbers,
    recovery,
    reductions,
    start_up,
    streams,
    updates,
)
from benchmarks.runs import THREADS, best_threads, run_side
from benchmarks.show import show, show_pairs


def bench_training(repeats: int) -> None:
    print("FC 784-256-256-10, batch 64, AdamW, one wafer; OMP_WAIT_POLICY=PASSIVE on both sides")
    best = best_threads("fc_training", "steps_per_second", 1000)
    for lane, num_steps in (("shared_memory", 2000), ("grpc", 600)):
        eager, cluster = [], []
        for _ in range(repeats):
            eager.append(run_side("fc_training", "eager", best, 2000)["steps_per_second"])
            cluster.append(run_side("fc_training", "cluster", 1, num_steps, lane)["steps_per_second"])
        show_pairs(f"cluster, {lane}", cluster, "eager, fused AdamW", eager, "steps/s")


def bench_gpt2(repeats: int) -> None:
    print("GPT-2 small, sequence 256, batch 4, bfloat16, one wafer; OMP_WAIT_POLICY=PASSIVE on all sides")
    others = [(side, threads) for side in ("eager", "compiled") for threads in THREADS]
    rates: dict[tuple[str, int], list[float]] = {other: [] for other in others}
    clusters: dict[str, list[float]] = {"cluster": [], "inductor": []}
    spent: Mapping[str, Any] = {}
    for _ in range(repeats):
        for side, threads in others:
            rates[side, threads].append(run_side("gpt2_training", side, threads, 8)["tokens_per_second"])
        for kernels, values in clusters.items():
            run = run_side("gpt2_training", kernels, 1, 8)
            values.append(run["tokens_per_second"])
            spent = run["share_of_time"] if kernels == "cluster" else spent
    for (side, threads), values in rates.items():
        show(f"{side}, autocast and fused AdamW, threads: {threads}", values, "tokens/s")
    best = _best(rates)
    show_pairs("cluster, shared_memory", clusters["cluster"], "the best of these in each round", best, "tokens/s")
    show_pairs(
        "the same, kernels by Inductor", clusters["inductor"], "the best of these in each round", best, "tokens/s"
    )
    print("  where the roles' time went, of the last run with torch's own kernels:")
    for role, shares in spent.items():
        print(f"    {role:12s}" + ", ".join(f"{what} {share:.1%}" for what, share in shares.items()))


def _best(rates: Mapping[tuple[str, int], Sequence[float]]) -> list[float]:
    return [max(of_a_round) for of_a_round in zip(*rates.values(), strict=True)]


def bench_start_up(repeats: int) -> None:
    print("time to first loss, from `python train.py`")
    for kind, seconds in start_up.measure(repeats).items():
        show(kind, seconds, "s")


def bench_random_numbers(repeats: int) -> None:
    print("random numbers on one thread: the cluster's and torch's own")
    for label, ours, theirs in random_numbers.measure(repeats * 5):
        show(label, ours, "ns")
        show("  time of torch's own", [a / b for a, b in zip(ours, theirs, strict=True)], "x")


def bench_initialisation(repeats: int) -> None:
    for millions in (200, 1000):
        found = initialisation.measure(millions, repeats)
        lazy, eager = found["lazy"], found["eager"]
        print(f"a model of {lazy[0]['parameters'] / 1e6:.0f}M parameters made under `with backend.device`")
        for label, figure, unit, scale in (
            ("until it is made", "model_seconds", "s", 1.0),
            ("time to first loss", "seconds", "s", 1.0),
            ("the client's peak memory", "peak_bytes", "MB", 1e-6),
        ):
            ours, theirs = ([run[figure] * scale for run in runs] for runs in (lazy, eager))
            show_pairs(f"{label}, lazy", ours, f"{label}, eager", theirs, unit)


PARTS: Mapping[str, Callable[[int], None]] = {
    "training": bench_training,
    "gpt2": bench_gpt2,
    "pipelined": pipelined.bench,
    "start-up": bench_start_up,
    "initialisation": bench_initialisation,
    "operations": operations.bench,
    "compile": lambda repeats: compile_stages.bench(),
    "compile-layers": lambda repeats: compile_layers.bench(),
    "checkpoints": checkpoints.bench,
    "prediction": prediction.bench,
    "hosts": hosts.bench,
    "nodes": nodes.bench,
    "larger-than-memory": larger_than_memory.bench,
    "memory": lambda repeats: memory.bench(),
    "micro-batches": micro_batches.bench,
    "recovery": recovery.bench,
    "deaths": deaths.bench,
    "products": lambda repeats: products.bench(repeats * 3),
    "updates": lambda repeats: updates.bench(repeats * 3),
    "reductions": reductions.bench,
    "streams": lambda repeats: streams.main(),
    "random": bench_random_numbers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for part in options.part or PARTS:
        PARTS[part](options.repeats)


if __name__ == "__main__":
    main()
