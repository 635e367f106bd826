"""The weight stream between hosts: how much of a 1 Gbit/s link it fills while a network of wide layers trains.

Three hosts (network namespaces; needs root): management and the script, MemoryX with SwarmX and an input worker, the
wafer. What MemoryX's host sends over its link while steps go by, against what the link carries:

    python -m benchmarks.hosts
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.by_hand import cluster_by_hand
from benchmarks.network import Host, hosts
from benchmarks.runs import ENVIRONMENT

RATE: Final = "1gbit"
LINK_BYTES_PER_SECOND: Final = 125e6
LAYERS, WIDTH, BATCH = 24, 768, 32
WARM_STEPS: Final = 5
MEASURED_STEPS: Final = 20
END_SECONDS: Final = 10.0


def run(host: Host, management: str, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    """Starts a script on a host, with the cluster."""
    environment: Mapping[str, str] = {**os.environ, "WAFERBOX_MANAGEMENT": management, **variables}
    return subprocess.Popen(
        host.command(sys.executable, *command),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def measure() -> tuple[float, float]:
    """Bytes per second that MemoryX's host sends while steps go by, and steps per second."""
    with hosts(3, RATE) as (first, second, third), tempfile.TemporaryDirectory() as name:
        places = [("memoryx", second), ("swarmx", second), ("workers", second), ("wafer", third)]
        variables = {**os.environ, **ENVIRONMENT, "WAFERBOX_CACHE": f"{name}/cache"}
        with cluster_by_hand(first, places, variables, Path(name) / "roles.log") as management:
            script = run(first, management, ["-m", "benchmarks.hosts", "script", "--folder", name])
            assert script.stdout is not None
            seen: list[tuple[float, int]] = []
            for line in script.stdout:
                if line.strip() in (f"step {WARM_STEPS}", f"step {WARM_STEPS + MEASURED_STEPS}"):
                    seen.append((time.perf_counter(), second.sent_bytes()))
            _, errors = script.communicate(timeout=END_SECONDS)
            if script.returncode or len(seen) != 2:
                raise RuntimeError(errors)
    (begin, sent_before), (end, sent) = seen
    return (sent - sent_before) / (end - begin), MEASURED_STEPS / (end - begin)


def bench(repeats: int) -> None:
    """Prints how full the link is."""
    print(f"weight stream between hosts: {LAYERS} layers of {WIDTH} x {WIDTH} in float32, {RATE} links, one wafer")
    for _ in range(repeats):
        sent, steps = measure()
        megabytes = sent / 1e6
        print(
            f"  {megabytes:.0f} MB/s, {sent / LINK_BYTES_PER_SECOND:.2f} of the link; {steps:.2f} steps/s", flush=True
        )


def train(folder: Path) -> None:
    """The script: says which step it has seen."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import cerebras.pytorch as cstorch

    torch.manual_seed(0)
    backend = cstorch.backend("CSX", artifact_dir=folder)
    with backend.device:
        model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.01)

    @cstorch.trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = F.mse_loss(compiled(batch[0]), batch[0])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    @cstorch.step_closure
    def report(loss: torch.Tensor, step: int) -> None:
        print(f"step {step}", flush=True)

    executor = cstorch.utils.data.DataExecutor(
        cstorch.utils.data.DataLoader(make_input), num_steps=WARM_STEPS + MEASURED_STEPS
    )
    for batch in executor:
        report(training_step(batch), executor.user_iteration)


def make_input() -> Iterable[Any]:
    """Batches of random numbers."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(torch.randn(BATCH * 50, WIDTH)), batch_size=BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("what", choices=["measure", "script"], default="measure", nargs="?")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.what == "measure":
        bench(options.repeats)
    else:
        train(options.folder)


if __name__ == "__main__":
    main()
