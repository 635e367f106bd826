"""Layer pipelined mode beside weight streaming and eager PyTorch, all in turns."""

from typing import Final

from benchmarks.runs import best_threads, run_side
from benchmarks.show import show_pairs

FC_STEPS: Final = 2000
GPT2_STEPS: Final = 8
STRATEGIES: Final = ("pipeline", "weight_streaming")


def bench(repeats: int) -> None:
    print("FC 784-256-256-10, batch 64, AdamW, one wafer; OMP_WAIT_POLICY=PASSIVE on all sides")
    _compare("fc_training", "steps_per_second", FC_STEPS, repeats, "steps/s")
    print("GPT-2 small, sequence 256, batch 4, bfloat16, one wafer; OMP_WAIT_POLICY=PASSIVE on all sides")
    _compare("gpt2_training", "tokens_per_second", GPT2_STEPS, repeats, "tokens/s")


def _compare(module: str, figure: str, num_steps: int, repeats: int, unit: str) -> None:
    best = best_threads(module, figure, num_steps // 2)
    eager: list[float] = []
    cluster: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(repeats):
        eager.append(run_side(module, "eager", best, num_steps)[figure])
        for strategy, values in cluster.items():
            values.append(run_side(module, "cluster", 1, num_steps, strategy=strategy)[figure])
    for strategy, values in cluster.items():
        show_pairs(f"cluster, {strategy}", values, "eager", eager, unit)
    show_pairs("pipeline", cluster["pipeline"], "weight streaming", cluster["weight_streaming"], unit)
