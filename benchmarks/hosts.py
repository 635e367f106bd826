"""Training over several hosts, each behind a link of 1 Gbit/s: ours, and PyTorch's own DDP and FSDP2 over gloo.

The hosts are network namespaces (needs root). Each has a wafer, an input worker, a shard and a SwarmX node; the first
has the management service and the script too. Of each side the time of a step, and of ours the bytes that the busiest
link carries:

    python -m benchmarks.hosts --hosts 4 --repeats 3
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
from typing import TYPE_CHECKING, Any, Final

from benchmarks.by_hand import cluster_by_hand
from benchmarks.network import Host, hosts
from benchmarks.runs import ENVIRONMENT
from benchmarks.show import show, show_pairs

if TYPE_CHECKING:
    from torch import nn

RATE: Final = "1gbit"
LAYERS, WIDTH, BATCH = 8, 1024, 32  # rows of a host
WARM_STEPS: Final = 5
MEASURED_STEPS: Final = 20
SIDES: Final = ("ddp", "fsdp")
RUN_SECONDS: Final = 300.0


def make_layers() -> "nn.Sequential":
    """The network."""
    from torch import nn

    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def streamed_bytes(count: int) -> float:
    """The bytes over a link in a step, in each direction: weights are streamed once, gradients are reduced once."""
    return (count - 1) / count * 2 * LAYERS * 4 * WIDTH * WIDTH


def cluster_steps(made: Sequence[Host]) -> tuple[float, float]:
    """Returns the seconds of a step of the cluster, and the bytes that the busiest host sends in a step."""
    with tempfile.TemporaryDirectory() as name:
        modules = ("memoryx", "swarmx", "workers", "wafer")
        places = [(module, host) for host in made for module in modules]
        variables = {**os.environ, **ENVIRONMENT, "WAFERBOX_CACHE": f"{name}/cache", "OMP_NUM_THREADS": "1"}
        with cluster_by_hand(made[0], places, variables, Path(name) / "roles.log") as management:
            words = ["-m", "benchmarks.hosts", "script", "--folder", name, "--hosts", str(len(made))]
            script = _start(made[0], words, {**variables, "WAFERBOX_MANAGEMENT": management})
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


def distributed_steps(made: Sequence[Host], side: str) -> float:
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
        words = ["-m", "benchmarks.distributed_training", side]
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


def bench(repeats: int, count: int = 4) -> None:
    """Prints the times of a step on so many hosts."""
    print(f"{LAYERS} layers of {WIDTH} x {WIDTH} in float32, {BATCH} rows on each of {count} hosts, {RATE} links, SGD")
    times: dict[str, list[float]] = {side: [] for side in ("cluster", *SIDES)}
    shares = []
    for _ in range(repeats):
        with hosts(count, RATE) as made:
            seconds, sent = cluster_steps(made)
            times["cluster"].append(seconds)
            shares.append(sent / streamed_bytes(count) if count > 1 else 1.0)
            for side in SIDES:
                times[side].append(distributed_steps(made, side))
    for side in SIDES:
        show_pairs(f"{side} over gloo", times[side], "cluster", times["cluster"], "s a step")
    show("bytes over the busiest link / the arithmetic", shares, "")


def train(folder: Path, count: int) -> None:
    """The script: says which step it has seen."""
    import torch
    import torch.nn.functional as F

    import cerebras.pytorch as cstorch

    torch.manual_seed(0)
    config = cstorch.distributed.ClusterConfig(num_csx=count)
    backend = cstorch.backend("CSX", artifact_dir=folder, cluster_config=config)
    with backend.device:
        model = make_layers()
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.01)

    @cstorch.trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = F.mse_loss(compiled(batch[0]), batch[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def report(loss: torch.Tensor, step: int) -> None:
        print(f"step {step}", flush=True)

    executor = cstorch.utils.data.DataExecutor(
        cstorch.utils.data.DataLoader(make_input, BATCH * count), num_steps=WARM_STEPS + MEASURED_STEPS
    )
    for batch in executor:
        report(training_step(batch), executor.user_iteration)


def make_input(rows: int) -> Iterable[Any]:
    """Batches of random numbers."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(torch.randn(rows * 4, WIDTH).repeat(10, 1)), batch_size=rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("what", choices=["measure", "script"], default="measure", nargs="?")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.what == "measure":
        bench(options.repeats, options.hosts)
    else:
        train(options.folder, options.hosts)


if __name__ == "__main__":
    main()
