"""Training over several hosts, each behind a link of its own: ours, and PyTorch's own DDP and FSDP2 over gloo.

The hosts are network namespaces (needs root). Each has a wafer, an input worker, a shard and a SwarmX node; the first
has the management service and the script too. Of each side the time of a step, and of ours the bytes that the busiest
link carries:

    python -m benchmarks.hosts --hosts 4 --repeats 3

Two cores that stand for four hosts are busy for most of a step at 1 Gbit/s. A lower --rate shows what the fabric alone
takes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch
from benchmarks.by_hand import cluster_by_hand
from benchmarks.host_trainings import MEASURED_STEPS, TRAININGS, WARM_STEPS
from benchmarks.network import Host, hosts
from benchmarks.runs import ENVIRONMENT
from benchmarks.show import show, show_pairs

RATE: Final = "1gbit"
SIDES: Final = ("ddp", "fsdp")
RUN_SECONDS: Final = 300.0


def cluster_steps(made: Sequence[Host], network: str) -> tuple[float, float]:
    """Returns the seconds of a step of the cluster, and the bytes that the busiest host sends in a step."""
    with tempfile.TemporaryDirectory() as name:
        modules = ("memoryx", "swarmx", "workers", "wafer")
        places = [(module, host) for host in made for module in modules]
        variables = {**os.environ, **ENVIRONMENT, "WAFERBOX_CACHE": f"{name}/cache", "OMP_NUM_THREADS": "1"}
        with cluster_by_hand(made[0], places, variables, Path(name) / "roles.log") as management:
            words = ["script", "--folder", name, "--hosts", str(len(made)), "--train", network]
            script = _start(
                made[0], ["-m", "benchmarks.hosts", *words], {**variables, "WAFERBOX_MANAGEMENT": management}
            )
            assert script.stdout is not None
            seen: list[tuple[float, list[int]]] = []
            for line in script.stdout:
                if line.strip() in (f"step {WARM_STEPS}", f"step {WARM_STEPS + MEASURED_STEPS}"):
                    seen.append((time.perf_counter(), [host.sent_bytes() for host in made]))
            _, errors = script.communicate(timeout=RUN_SECONDS)
            if script.returncode or len(seen) != 2:
                raise RuntimeError(errors)
    (begin, before), (end, after) = seen
    busiest = max(now - earlier for now, earlier in zip(after, before, strict=True))
    return (end - begin) / MEASURED_STEPS, busiest / MEASURED_STEPS


def distributed_steps(made: Sequence[Host], network: str, side: str) -> float:
    """Returns the seconds of a step of PyTorch's own side."""
    processes = []
    for rank, host in enumerate(made):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(made)),
            "MASTER_ADDR": made[0].address,
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "uplink",
            "OMP_NUM_THREADS": "1",
        }
        words = ["-m", "benchmarks.distributed_training", side, network]
        processes.append(_start(host, words, {**os.environ, **ENVIRONMENT, **variables}))
    results = [process.communicate(timeout=RUN_SECONDS) for process in processes]
    failed = [errors for process, (_, errors) in zip(processes, results, strict=True) if process.returncode]
    if failed:
        raise RuntimeError(failed[0])
    return float(json.loads(results[0][0].splitlines()[-1])["step_seconds"])


def _start(host: Host, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Starts a script on a host."""
    return subprocess.Popen(
        host.command(sys.executable, *words),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def bench(repeats: int, count: int = 4, network: str = "layers", rate: str = RATE) -> None:
    """Prints the times of a step on so many hosts."""
    training = TRAININGS[network]
    print(f"{training.title}, {training.rows} rows on each of {count} hosts, {rate} links, SGD")
    times: dict[str, list[float]] = {side: [] for side in ("cluster", *SIDES)}
    shares = []
    streamed = training.streamed_bytes(count)
    for _ in range(repeats):
        with hosts(count, rate) as made:
            seconds, sent = cluster_steps(made, network)
            times["cluster"].append(seconds)
            shares.append(sent / streamed if count > 1 else 1.0)
            for side in SIDES:
                times[side].append(distributed_steps(made, network, side))
    for side in SIDES:
        show_pairs(f"{side} over gloo", times[side], "cluster", times["cluster"], "s a step")
    show("bytes over the busiest link / the arithmetic", shares, "")


def train(folder: Path, count: int, network: str) -> None:
    """The script: says which step it has seen."""
    training = TRAININGS[network]
    torch.manual_seed(0)
    if training.half:
        cstorch.amp.set_half_dtype("bfloat16")
        cstorch.amp.enable_mixed_precision()
        cstorch.backends.csx.precision.half_gradients = True
    config = cstorch.distributed.ClusterConfig(num_csx=count)
    backend = cstorch.backend("CSX", artifact_dir=folder, cluster_config=config)
    with backend.device:
        model = training.make_model()
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.01)

    @cstorch.trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = training.loss(compiled(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def report(loss: torch.Tensor, step: int) -> None:
        print(f"step {step}", flush=True)

    executor = cstorch.utils.data.DataExecutor(
        cstorch.utils.data.DataLoader(make_input, network, training.rows * count), num_steps=WARM_STEPS + MEASURED_STEPS
    )
    for batch in executor:
        report(training_step(batch), executor.user_iteration)


def make_input(network: str, rows: int) -> Iterable[Any]:
    """Batches of random numbers."""
    data = TensorDataset(*(part.repeat(10, *[1] * (part.dim() - 1)) for part in TRAININGS[network].make_rows(rows * 4)))
    return DataLoader(data, batch_size=rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("what", choices=["measure", "script"], default="measure", nargs="?")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train", choices=[*TRAININGS], default="layers")
    parser.add_argument("--rate", default=RATE, help="of each link in each direction, as tc has it")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.what == "measure":
        bench(options.repeats, options.hosts, options.train, options.rate)
    else:
        train(options.folder, options.hosts, options.train)


if __name__ == "__main__":
    main()
