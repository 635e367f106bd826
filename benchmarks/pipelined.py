"""Layer pipelined mode beside weight streaming and eager PyTorch, all in turns.

And first what the machine can give to it: how much two threads, each with a region's products, do in the time of one.
Where that is 1 (the cores share one, or its arithmetic), no division of the products among threads is any faster.
"""

import itertools
import threading
import time
from typing import Final

import torch

from benchmarks.runs import best_threads, run_side
from benchmarks.show import show, show_pairs

FC_STEPS: Final = 2000
GPT2_STEPS: Final = 8
STRATEGIES: Final = ("pipeline", "weight_streaming")


PRODUCTS: Final = 400
ROWS, WIDTHS = 64, (784, 256, 256, 10)


def bench(repeats: int) -> None:
    shares = [second_core() for _ in range(max(3, repeats))]
    show("what two threads do of the network's products, one doing 1", shares, "")
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


def second_core() -> float:
    """Products per second of two threads over those of one, each with operands of its own: from 1 to 2."""
    torch.set_num_threads(1)

    def work() -> None:
        pairs = [(torch.randn(ROWS, n), torch.randn(n, m)) for n, m in itertools.pairwise(WIDTHS)]
        for _ in range(PRODUCTS):
            for left, right in pairs:
                torch.mm(torch.mm(left, right), right.T)

    def seconds(count: int) -> float:
        threads = [threading.Thread(target=work) for _ in range(count)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    seconds(1)
    return 2 * seconds(1) / seconds(2)
