"""Runs of one model of the public Model Zoo: on the CPU, and on a cluster that starts with the script."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from zoo_cuts import STEPS, cut, inputs
from zoo_models import Model, import_root, is_before_1_9
from zoo_samples import NoSamples, Samples

REPOSITORY = Path(__file__).parents[2]
# The other way of release 1.8 drives the inside of the vendor's client.
_SETTINGS_OF_1_8 = {"experimental_api": True, "transfer_processes": 5}
_LOSS = re.compile(r"Step=(\d+), Loss=([-+\w.]+)", re.IGNORECASE)
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*", re.MULTILINE)
_OF_CALLBACK = "Encountered error when calling"  # which release 2.10 raises after an error in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How the runs of a model ended.

    Attributes:
        model: The model.
        losses: Of each step on the cluster.
        reason: Why the model does not train on the cluster; empty if it does.
        on_cpu: Of each step on the CPU.
        reason_on_cpu: Why the model does not train on the CPU; empty if it does.
    """

    model: Model
    losses: list[float] = field(default_factory=list)
    reason: str = ""
    on_cpu: list[float] = field(default_factory=list)
    reason_on_cpu: str = ""


def run(model: Model, checkout: Path, folder: Path, limit: float) -> Result:
    """Trains a model for some steps in a folder of its own, at most so many seconds on each device."""
    if model.configuration is None:
        return Result(model=model, reason="the release has no configuration of it")
    try:
        losses, reason = _train(model, checkout, folder / "cluster", "CSX", limit)
        on_cpu, reason_on_cpu = _train(model, checkout, folder / "cpu", "CPU", limit)
    except NoSamples as problem:
        return Result(model=model, reason=str(problem))
    return Result(model=model, losses=losses, reason=reason, on_cpu=on_cpu, reason_on_cpu=reason_on_cpu)


def _train(model: Model, checkout: Path, folder: Path, device: str, limit: float) -> tuple[list[float], str]:
    """The loss of each step, and why there are not all."""
    assert model.configuration is not None
    folder.mkdir(parents=True)
    configuration = cut(yaml.safe_load(model.configuration.read_text()), folder / "model", device)
    for number, (name, section) in enumerate(inputs(configuration)):
        Samples(folder / f"{name}-{number}", section, configuration).write()
    device_arguments = [device]
    if is_before_1_9(checkout):
        # On the CPU its model seeds torch anew, after the draws of the weights: the order of samples would be another.
        for _, section in inputs(configuration):
            section["shuffle"] = False
        if device == "CSX":
            device_arguments.append("weight_streaming")
            configuration["runconfig"] |= _SETTINGS_OF_1_8
    parameters = folder / "params.yaml"
    parameters.write_text(yaml.safe_dump(configuration))
    if "trainer" in configuration:
        command = ["-m", "cerebras.modelzoo.cli.main", "fit", str(parameters)]
    else:
        command = [str(model.script), *device_arguments, "--mode", "train"]
        command += ["--params", str(parameters), "--model_dir", str(folder / "model")]
    text, status = execute(command, checkout, folder, limit)
    losses = dict(_LOSS.findall(text))
    return [float(loss) for loss in losses.values()], _reason(text, status, losses, limit)


def execute(
    command: Sequence[str],
    checkout: Path,
    folder: Path,
    limit: float,
    settings: Mapping[str, str] | None = None,
    watch: Callable[[], None] = lambda: None,
) -> tuple[str, int | None]:
    """Executes a script of a checkout.

    Args:
        command: Arguments of Python.
        checkout: The checkout.
        folder: The working folder; the output is in its file `log`.
        limit: Seconds that the command may take.
        settings: More variables of its environment.
        watch: Is called about once a second meanwhile.

    Returns:
        Its output and its exit status, which is None if it was not done at the limit.
    """
    paths = (import_root(checkout), REPOSITORY, REPOSITORY / "client", REPOSITORY / "proto")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | dict(settings or {})
    log = folder / "log"
    deadline = time.monotonic() + limit
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        status = None
        try:
            while status is None and time.monotonic() < deadline:
                watch()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return log.read_text(errors="replace"), status


def failure(text: str, status: int | None, limit: float) -> str:
    """Why a script failed, by its output and its exit status; empty if it did not."""
    if status is None:
        return f"not done after {limit:.0f} s"
    if status:
        errors = [error for error in _ERROR.findall(text) if _OF_CALLBACK not in error]
        return str(errors[-1]) if errors else f"exit status {status}"
    return ""


def _reason(text: str, status: int | None, losses: dict[str, str], limit: float) -> str:
    if reason := failure(text, status, limit):
        return reason
    if list(losses) != [str(step) for step in range(1, STEPS + 1)]:
        return f"the steps with a loss are {', '.join(losses) or 'none'}"
    if not all(math.isfinite(float(loss)) for loss in losses.values()):
        return f"the losses are {', '.join(losses.values())}"
    return ""
