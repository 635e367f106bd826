"""A module of the script that makes the backend, in a process that only imports it."""

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import cerebras_pytorch.experimental as release_1_8
import cerebras_torch as release_1_2
import cstorch
from cerebras_pytorch.experimental import configuration
from cerebras_pytorch.late_backend import backend as late_backend
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import UsageError
from cstorch.utils.data import DataExecutor, DataLoader
from cstorch.utils.tensorboard import SummaryWriter
from waferbox.input_process.messages import INPUT_VARIABLE, InputSettings, encode

# It has no port that anything listens to, so that what connects fails.
NOWHERE = "127.0.0.1:1"

SCRIPT = """
import multiprocessing

import cstorch
from cstorch.errors import ConfigurationError

if __name__ == "__mp_main__":
    backend = cstorch.backend("CSX")
    loader = cstorch.utils.data.DataLoader(list)
    try:
        next(iter(cstorch.utils.data.DataExecutor(loader, num_steps=1)))
    except cstorch.errors.UsageError as error:
        print(error)

def use():
    try:
        next(iter(cstorch.utils.data.DataExecutor(loader, num_steps=1)))
    except ConfigurationError as error:
        print(error)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=use)
    process.start()
    process.join()
"""


@pytest.fixture
def in_input_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings = InputSettings(worker=0, num_workers=1, wafer=0, num_csx=1, half_type="", mixed_precision=False)
    monkeypatch.setenv(INPUT_VARIABLE, encode(settings).decode())
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(configuration, "_configuration", None)
    yield
    cstorch.close_backend()


def current(folder: Path) -> None:
    backend = cstorch.backend("CSX", artifact_dir=folder / "logs", cluster_config=ClusterConfig(num_csx=2))
    assert cstorch.backend() is backend
    with backend.device:
        model = nn.Linear(2, 2)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(compiled.parameters(), lr=0.1)
    cstorch.optim.lr_scheduler.ConstantLR(optimizer, learning_rate=0.1)
    cstorch.metrics.AccuracyMetric("accuracy")
    cstorch.trace(lambda batch: compiled(batch))
    backend.release()


def of_2_0(folder: Path) -> None:
    late_backend("CSX", artifact_dir=folder / "logs")
    config = cstorch.utils.CSConfig(num_csx=2)
    DataExecutor(DataLoader(list), num_steps=2, cs_config=config)


def of_1_8(folder: Path) -> None:
    release_1_8.configure(model_dir=folder / "logs")
    release_1_8.compile(nn.Linear(2, 2), "wse_ws")


def of_1_2(folder: Path) -> None:
    release_1_2.initialize(cs_ip=NOWHERE, service_workdir=folder / "logs", appliance=True)
    release_1_2.module(nn.Linear(2, 2))


@pytest.mark.usefixtures("in_input_process")
@pytest.mark.parametrize("management", ["embedded", NOWHERE])
@pytest.mark.parametrize("module", [current, of_2_0, of_1_8, of_1_2])
def test_the_process_of_an_input_fn_imports_a_module_without_a_cluster(
    management: str,
    module: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", management)
    caplog.set_level(logging.INFO, "cstorch")
    with warnings.catch_warnings(action="error"):
        module(tmp_path)
        executor = DataExecutor(DataLoader(list), num_steps=2)
    assert (caplog.messages, list(tmp_path.iterdir())) == ([], [])
    with pytest.raises(UsageError, match=r"at .*:\d+ the loop .* in the process of an input_fn.*if __name__ =="):
        next(iter(executor))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("in_input_process")
def test_a_writer_of_summaries_makes_no_file_there(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        assert list(tmp_path.iterdir()) == []
        writer.add_scalar("loss", 1.0, 1)
        writer.add_tensor("weight", torch.ones(2), 1)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.cluster  # it starts processes
def test_a_spawned_process_reaches_for_the_cluster_when_it_runs_a_step(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"WAFERBOX_MANAGEMENT": "nowhere"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    refused, reached = done.stdout.splitlines()
    assert "in a process that multiprocessing spawns, which imports the script's module" in refused
    assert "'nowhere', which is neither host:port nor a cluster" in reached
    assert done.stderr == ""
