"""Time from `python train.py` to the first loss, with and without the compiled artifact in the cache."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "fc_digits" / "train.py"
DEADLINE_SECONDS = 120.0


def seconds_to_first_loss(model_dir: Path, cache: Path) -> float:
    """Runs the digits example for one step in a process of its own, until its first line with a loss."""
    command = [sys.executable, str(SCRIPT), "--num-csx", "1", "--num-steps", "1", "--checkpoint-steps", "0"]
    command += ["--data", str(cache / "digits.pt")]
    environment = {**os.environ, "WAFERBOX_CACHE": str(cache)}
    environment.pop("WAFERBOX_MANAGEMENT", None)
    started = time.perf_counter()
    first: float | None = None
    with subprocess.Popen(
        [*command, "--model-dir", str(model_dir)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if first is None and "Loss=" in line:
                first = time.perf_counter() - started
        process.wait(DEADLINE_SECONDS)
    if first is None or process.returncode:
        raise RuntimeError("the example did not run:\n" + "".join(output))
    return first


def measure(repeats: int) -> dict[str, list[float]]:
    """Seconds to the first loss, `repeats` times each: with a fresh cache ("cold"), and again with it ("cached")."""
    seconds: dict[str, list[float]] = {"cold": [], "cached": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "cached"):
                seconds[kind].append(seconds_to_first_loss(Path(folder) / kind, Path(folder) / "cache"))
    return seconds
