"""Time from `python train.py` to the first loss: compiled artifact cached or not, and on a cluster that is up."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from waferbox.cluster.embedded_process import start_embedded, stop_embedded
from waferbox.cluster.launcher import ClusterSettings
from waferbox.launch.local_clusters import Starter

SCRIPT = Path(__file__).parents[1] / "examples" / "fc_digits" / "train.py"
DIGITS = "digits.pt"  # what the example makes of those of scikit-learn, once
DEADLINE_SECONDS = 120.0


def seconds_to_first_loss(model_dir: Path, cache: Path, management: str = "") -> float:
    """Runs the digits example for one step in a process of its own, until its first line with a loss.

    management: of a cluster that is up, with that cache; else the script has an embedded one.
    """
    command = [sys.executable, str(SCRIPT), "--num-csx", "1", "--num-steps", "1", "--checkpoint-steps", "0"]
    command += ["--data", str(cache / DIGITS)]
    environment = {**os.environ}
    environment["WAFERBOX_MANAGEMENT"] = management or "embedded"
    environment |= {} if management else {"WAFERBOX_CACHE": str(cache)}
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
    """Seconds to the first loss, `repeats` times each, in turn.

    "cold": an embedded cluster with a fresh cache, and the example imports scikit-learn for its digits; "not compiled":
    with another one, and these digits; "cached": again with it; "cluster is up": with that cache.
    """
    seconds: dict[str, list[float]] = {"cold": [], "not compiled": [], "cached": [], "cluster is up": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            first, cache = Path(folder) / "first", Path(folder) / "cache"
            seconds["cold"].append(seconds_to_first_loss(Path(folder) / "cold", first))
            cache.mkdir()
            shutil.copy(first / DIGITS, cache)
            for kind in ("not compiled", "cached"):
                seconds[kind].append(seconds_to_first_loss(Path(folder) / kind, cache))
            process, management, *_ = start_embedded(ClusterSettings(cache_root=str(cache)), Starter.RUN, "start-up")
            try:
                seconds["cluster is up"].append(seconds_to_first_loss(Path(folder) / "up", cache, management))
            finally:
                stop_embedded(process)
    return seconds
