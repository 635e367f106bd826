"""The trainer: rounds of a training and an evaluation, with callbacks, checkpoints and summaries."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import torch
from cerebras.appliance.log import collect_wsc_log_settings, get_level_name, wsc_logger
from cerebras.appliance.utils.file import create_symlink
from cerebras.pytorch.backend import Backend, BackendType, get_backend_args
from cerebras.pytorch.utils.call_once import call_once
from torch import nn

import cerebras.pytorch as cstorch
from cerebras.pytorch.utils.data import DataExecutor, DataLoader, Schedule
from cerebras.pytorch.utils.tensorboard import SummaryWriter
from trainer_program.callbacks import Callback, Checkpoint


@lru_cache(maxsize=1)
def backend_for(kind: str, **settings: Any) -> Backend:
    """The backend of a type; the same for the same settings."""
    backend_type = BackendType.from_str(kind)
    known = get_backend_args(backend_type)
    return cstorch.backend(backend_type, **{name: value for name, value in settings.items() if name in known})


class Trainer:
    """Trains a model for some steps, in rounds, with an evaluation behind each."""

    def __init__(
        self,
        backend: Backend,
        folder: Path,
        model: Callable[[], nn.Module],
        optimizer: Callable[[Sequence[nn.Parameter]], cstorch.optim.Optimizer],
        schedulers: Sequence[Callable[[cstorch.optim.Optimizer], cstorch.optim.scheduler.Scheduler]],
        checkpoint: Checkpoint,
        callbacks: Sequence[Callback],
        steps: int,
        rounds: int,
    ) -> None:
        self.backend, self.folder, self.checkpoint = backend, folder, checkpoint
        self.steps, self.rounds = steps, rounds
        backend.artifact_dir = folder / "artifacts" / "first"
        backend.artifact_dir.mkdir(parents=True)
        create_symlink(folder / "artifacts" / "latest", "first")
        set_log_level("info")
        with backend.device:
            self.model = model()
        self.compiled = cstorch.compile(self.model, backend)
        self.optimizer = optimizer([*self.model.parameters()])
        self.schedulers = [make(self.optimizer) for make in schedulers]
        assert len({schedule.param_group_key for schedule in self.schedulers}) == len(self.schedulers)
        self.global_step = 0
        self.callbacks = [checkpoint, *callbacks]
        self.writer = SummaryWriter(log_dir=str(folder / "events"))
        create_symlink(folder / "cs_events", self.writer.cs_events_dir.relative_to(folder))
        self.scopes: dict[int, str] = {}
        self.executor: DataExecutor
        self.loss: torch.Tensor
        self.returned: torch.Tensor
        self.scaler = cstorch.amp.GradScaler()
        self.call("on_setup")

    def call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    def log(self, **metrics: Any) -> None:
        """Writes scalars, when they have values."""
        if self.backend.is_tracing:
            self.log_in_closure(metrics=metrics)
            return
        for name, value in metrics.items():
            self.writer.add_scalar(name, float(torch.as_tensor(value).detach()), self.global_step)

    @cstorch.step_closure
    def log_in_closure(self, metrics: dict[str, Any]) -> None:
        assert not self.backend.is_tracing
        self.log(**metrics)

    def fit(self, training: DataLoader, evaluation: DataLoader, load_from: str | None = None) -> None:
        if self.backend.is_csx and self.backend.cluster.workflow_id is None:
            assert self.backend.cluster.start_workflow(lock_resources=False)
        self.training = training
        if load_from is not None:
            self.load(load_from)
        elif self.checkpoint.save_initial_checkpoint:
            self.save()
        of_round = ceil(self.steps / self.rounds)
        whole = Schedule.Range(self.checkpoint.steps - 1, self.steps, self.checkpoint.steps, include_last=True)
        while self.global_step < self.steps:
            end = min(self.steps, (self.global_step // of_round + 1) * of_round)
            self.train(training, end - self.global_step, whole)
            self.validate(evaluation)
        self.writer.flush()

    def train(self, loader: DataLoader, steps: int, whole: Schedule.Range) -> None:
        schedule = copy(whole)
        schedule.start = whole.next_immediate_step(self.global_step)
        here = [step - self.global_step for step in schedule if step < self.global_step + steps]
        checkpoints = Schedule([Schedule.Range(step, step + 1, 1, False) for step in here])
        assert len(checkpoints) == len(asdict(checkpoints)["intervals"]) == len(here)
        self.model.train()
        with ExitStack() as stack:
            self.call("on_loop", stack)
            self.executor = DataExecutor(loader, num_steps=steps, checkpoint_steps=checkpoints, profiler_activities=[])
            for batch in self.executor:
                self.global_step += 1
                self.returned = self.training_step(batch)
                self.call("on_batch_end", batch)
                self.save()
            self.call("on_loop_end")

    @cstorch.trace
    def training_step(self, batch: Any) -> torch.Tensor:
        self.call("on_batch", batch)
        self.loss = self.compiled(batch)
        self.scaler.scale(self.loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.call("on_backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        for schedule in self.schedulers:
            schedule.step()
        self.call("on_step")
        self.log(loss=self.loss, rate_of_learning=self.optimizer.param_groups[0]["lr"])
        return self.loss

    def validate(self, loader: DataLoader) -> None:
        name = self.scopes.setdefault(loader.id, f"validate_{len(self.scopes)}")
        self.model.eval()
        self.model.accuracy.reset()
        with ExitStack() as stack:
            self.call("on_loop", stack)
            self.executor = DataExecutor(copy(loader), num_steps=len(loader))
            for batch in self.executor:
                self.validation_step(batch, name)
            self.call("on_loop_end")
        self.log(**{f"{name}/accuracy": float(self.model.accuracy)})

    @cstorch.trace
    @torch.no_grad()
    def validation_step(self, batch: Any, name: str) -> torch.Tensor:
        self.call("on_batch", batch)
        loss: torch.Tensor = self.compiled(batch)
        self.log(**{f"{name}/loss": loss})
        return loss

    @cstorch.checkpoint_closure
    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedulers": [schedule.state_dict() for schedule in self.schedulers],
            "dataloader": self.training.state_dict(),
            "grad_scaler": self.scaler.state_dict(),
            "global_step": self.global_step,
        }
        self.checkpoint.save(state, self.checkpoint.path(self))

    def load(self, path: str) -> None:
        state = cstorch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for schedule, own in zip(self.schedulers, state["schedulers"], strict=True):
            schedule.load_state_dict(own)
        self.training.load_state_dict(state["dataloader"], strict=True)
        self.scaler.load_state_dict(state["grad_scaler"])
        self.global_step = state["global_step"]


@call_once()
def set_log_level(name: str) -> None:
    """Sets the level of the servers' logs."""
    wsc_logger.setLevel(get_level_name(name))
    assert [setting.tag for setting in collect_wsc_log_settings()] == [None]
