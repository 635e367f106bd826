"""Runs of one side of a pair, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# On all sides: an OpenMP thread that spins takes a core from the other processes. A script has a cluster of its own,
# unless a benchmark names one.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "WAFERBOX_MANAGEMENT": "embedded"}
THREADS = (1, 2)


def run_side(
    module: str, side: str, threads: int, num_steps: int, lane: str = "", strategy: str = "", **variables: str
) -> Any:
    """What `python -m benchmarks.<module> eager|cluster` prints. variables: more of the environment."""
    command = [sys.executable, "-m", f"benchmarks.{module}", side]
    command += ["--threads", str(threads), "--num-steps", str(num_steps)]
    chosen = {"WAFERBOX_LANE": lane, "WAFERBOX_EXECUTION_STRATEGY": strategy, **variables}
    environment = {**os.environ, **ENVIRONMENT, **{name: value for name, value in chosen.items() if value}}
    return run_for_result(command, environment, 600.0)


def run_for_result(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Any:
    """The last line that a command prints, which is JSON. Raises RuntimeError, subprocess.TimeoutExpired."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def best_threads(module: str, figure: str, num_steps: int) -> int:
    """The thread count with which eager is fastest."""
    trial = {threads: run_side(module, "eager", threads, num_steps)[figure] for threads in THREADS}
    best = max(trial, key=lambda threads: trial[threads])
    tried = ", ".join(f"{threads}: {value:.0f}" for threads, value in trial.items())
    print(f"  eager's best thread count is {best} ({tried} {figure.replace('_', ' ')})", flush=True)
    return best
