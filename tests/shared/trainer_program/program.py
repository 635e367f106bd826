"""Runs the trainer with a configuration: program.py CPU|CSX FOLDER [--load-from CHECKPOINT]."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from cerebras.appliance.utils import debug_args, ini
from cerebras.pytorch.utils.data.data_executor import MbsSetting
from pydantic import BaseModel, ConfigDict

import cerebras.pytorch as cstorch
from cerebras.appliance import environment
from cerebras.pytorch import _generating_docs
from cerebras.pytorch.optim.lr_scheduler import LRScheduler
from cerebras.pytorch.optim.scheduler import Scheduler
from cerebras.pytorch.optim.weight_decay_scheduler import WeightDecayScheduler
from trainer_program.callbacks import Callback, Checkpoint
from trainer_program.configuration import Configuration, configuration_of, named
from trainer_program.model import Input, Model
from trainer_program.trainer import Trainer, backend_for

HERE = Path(__file__).parent


class Settings(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")

    model: configuration_of(Model)  # type: ignore[valid-type]
    optimizer: named(cstorch.optim.Optimizer)  # type: ignore[valid-type]
    schedulers: list[named(Scheduler)]  # type: ignore[misc]
    checkpoint: named(Callback)  # type: ignore[valid-type]
    callbacks: list[named(Callback)]  # type: ignore[misc]
    training: configuration_of(Input)  # type: ignore[valid-type]
    evaluation: configuration_of(Input)  # type: ignore[valid-type]
    micro_batch_size: MbsSetting = "auto"
    steps: int
    rounds: int


def run(device: str, folder: Path, load_from: str | None = None, settings: str | None = None) -> Trainer:
    """Trains as a file says; returns the trainer."""
    assert not _generating_docs
    assert not environment.appliance_environ
    ini.set_default_ini(debug_args.get_debug_args(), some_switch=True)
    file = Settings(**yaml.safe_load(settings or (HERE / "program.yaml").read_text()))
    cstorch.backends.csx.performance.micro_batch_size = file.micro_batch_size
    torch.manual_seed(1)
    trainer = Trainer(
        backend=backend_for(device, cluster_config=cstorch.distributed.ClusterConfig(num_csx=2)),
        folder=folder,
        model=file.model.make,
        optimizer=lambda parameters: file.optimizer.make(params=parameters),
        schedulers=[partial(_make_schedule, schedule) for schedule in file.schedulers],
        checkpoint=_checked(file.checkpoint.make()),
        callbacks=[callback.make() for callback in file.callbacks],
        steps=file.steps,
        rounds=file.rounds,
    )
    trainer.fit(*(loader_for(each) for each in (file.training, file.evaluation)), load_from)
    return trainer


def loader_for(configuration: Configuration) -> cstorch.utils.data.DataLoader:
    """A loader whose input_fn gets the arguments, as a file has them."""
    return cstorch.utils.data.DataLoader(configuration.made_class, **configuration.model_dump())


def _make_schedule(configuration: Configuration, optimizer: cstorch.optim.Optimizer) -> Scheduler:
    schedule = configuration.make(optimizer=optimizer)
    assert isinstance(schedule, LRScheduler | WeightDecayScheduler)
    return schedule


def _checked(checkpoint: Any) -> Checkpoint:
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--load-from")
    arguments = parser.parse_args()
    run(arguments.device, arguments.folder, arguments.load_from)
