"""Lazy against eager initialisation of one model, each run in a process and a cluster of its own: the seconds until the
first loss, and the client's peak memory until then.

`python -m benchmarks.initialisation lazy|eager --parameters 200` runs one side and prints its figures as JSON.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH = 2048
TIMEOUT_SECONDS = 900.0


def run(side: str, layers: int, folder: Path) -> dict[str, float]:
    """Makes a model, compiles it and runs one step; in this process."""
    started = time.perf_counter()
    import torch
    from torch import nn

    import cstorch

    cstorch.backends.csx.debug.lazy_initialization = side == "lazy"
    backend = cstorch.backend("CSX", artifact_dir=folder / side)
    torch.manual_seed(0)
    with backend.device:
        model = nn.Sequential(
            *(
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                for _ in range(layers)
            )
        )
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.001)
    figures: dict[str, float] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model_seconds": time.perf_counter() - started,
    }

    def input_fn() -> Iterator[Any]:
        for _ in range(2):
            yield torch.ones(2, WIDTH)

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def take(loss: torch.Tensor) -> None:
        figures["loss"] = loss.item()
        figures["seconds"] = time.perf_counter() - started
        figures["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=1):
        take(step(batch))
    return figures


def measure(millions: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    """The figures of both sides, run in turn; what is compiled and generated is in the cache before the first."""
    found: dict[str, list[dict[str, float]]] = {"lazy": [], "eager": []}
    with tempfile.TemporaryDirectory() as folder:
        cache = str(Path(folder) / "cache")
        environment = {**os.environ, "WAFERBOX_CACHE": cache, "WAFERBOX_MANAGEMENT": "embedded"}
        for number in range(repeats + 1):
            for side, runs in found.items():
                command = [sys.executable, "-m", "benchmarks.initialisation", side]
                command += ["--parameters", str(millions), "--folder", folder]
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
                )
                if done.returncode:
                    raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
                if number:
                    runs.append(json.loads(done.stdout.splitlines()[-1]))
    assert len({figures["loss"] for runs in found.values() for figures in runs}) == 1, "initialised differently"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["lazy", "eager"])
    parser.add_argument("--parameters", type=int, default=200, help="millions, about")
    parser.add_argument("--folder", type=Path, default=Path("cerebras_logs"), help="takes the logs")
    options = parser.parse_args()
    layers = max(1, round(options.parameters * 1e6 / (8 * WIDTH**2)))
    print(json.dumps(run(options.side, layers, options.folder)))


if __name__ == "__main__":
    main()
