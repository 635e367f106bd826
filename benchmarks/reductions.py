"""Broadcast and reduction by SwarmX, beside gloo's all-reduce of as many bytes between as many processes.

Wafers that compute nothing receive all weights of a step and send all gradients, which SwarmX adds on their way to
MemoryX, where the weights are updated too: all of a step but what wafers compute. gloo leaves the sum of one tensor
with every process.

    python -m benchmarks.reductions --wafers N --nbytes BYTES      gloo alone
"""

import argparse
import datetime
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from typing import Any, Final

from benchmarks import prediction
from benchmarks.runs import ENVIRONMENT, run_for_result
from benchmarks.show import show_pairs
from waferbox.prediction.simulation import Compute
from wsc.v1 import plan_pb2

MODEL: Final = "wide"
COUNTS: Final = (2, 4)
ROUNDS: Final = 20
WARM_ROUNDS: Final = 5
SECONDS: Final = 120.0


def gradient_bytes(plan: plan_pb2.Plan) -> int:
    """Of one wafer, in a step; the loss among them."""
    return sum(group.nbytes for group in plan.swarmx.groups if group.kind == plan_pb2.GROUP_KIND_REDUCTION)


def bench(repeats: int) -> None:
    """SwarmX and gloo in turns."""
    print("broadcast and reduction over shared memory, beside gloo's all-reduce; GB/s of gradients")
    for wafers in COUNTS:
        ours, theirs = [], []
        for _ in range(repeats):
            run = prediction.measure("shared_memory", MODEL, wafers, Compute())
            nbytes = gradient_bytes(run.plan)
            command = [sys.executable, "-m", "benchmarks.reductions", "--wafers", str(wafers), "--nbytes", str(nbytes)]
            seconds = run_for_result(command, {**os.environ, **ENVIRONMENT}, SECONDS)["seconds"]
            ours.append(nbytes / run.step_seconds / 1e9)
            theirs.append(nbytes / seconds / 1e9)
        print(f"  {wafers} wafers, {nbytes / 1e6:.1f} MB")
        show_pairs("SwarmX: to the wafers, back, and updated", ours, "gloo's all-reduce", theirs, "GB/s")


def _all_reduce(rank: int, size: int, nbytes: int, port: int, results: Any) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    gradients = torch.ones(nbytes // 4)
    seconds = []
    for _ in range(WARM_ROUNDS + ROUNDS):
        distributed.barrier()
        begin = time.perf_counter()
        distributed.all_reduce(gradients)
        seconds.append(time.perf_counter() - begin)
        gradients.fill_(1.0)
    if rank == 0:
        results.put(statistics.median(seconds[WARM_ROUNDS:]))
    distributed.destroy_process_group()


def gloo(size: int, nbytes: int) -> float:
    """Seconds of an all-reduce between so many processes."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [context.Process(target=_all_reduce, args=(rank, size, nbytes, port, results)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        if process.exitcode != 0:
            raise RuntimeError(f"a process of gloo ended with {process.exitcode}")
    return float(results.get())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wafers", type=int, required=True)
    parser.add_argument("--nbytes", type=int, required=True)
    options = parser.parse_args()
    print(json.dumps({"seconds": gloo(options.wafers, options.nbytes)}))


if __name__ == "__main__":
    main()
