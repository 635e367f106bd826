"""What is done around the loops and steps of the trainer, besides the steps."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cerebras.appliance.cluster.client import TelemetryClient
from cerebras.appliance.errors import ApplianceDeadlockError, ApplianceNanError, ClusterJobCancelledByCsctl
from cerebras.appliance.log import named_class_logger
from cerebras.appliance.storage import S3Writer, StorageWriter, base_storage
from cerebras.appliance.utils.units import bytes_to_human
from cerebras.pytorch.backend import current_backend_impl
from cerebras.pytorch.backend.ltc_backend import register_after_tensor_to_cpu

import cerebras.profiler as profiler
import cerebras.pytorch as cstorch
from cerebras.pytorch.experimental.listener import register_traced_tensor_hook
from cerebras.pytorch.storage import serializers
from cerebras.pytorch.utils.data.utils import infer_batch_size
from cerebras.pytorch.utils.utils import FilterCallable, make_param_filter

if TYPE_CHECKING:
    from trainer_program.trainer import Trainer

FATAL = (ApplianceDeadlockError, ClusterJobCancelledByCsctl)


class Callback:
    """Does nothing; subclasses do something at some of these times."""

    def on_setup(self, trainer: "Trainer") -> None: ...
    def on_loop(self, trainer: "Trainer", stack: Any) -> None: ...
    def on_batch(self, trainer: "Trainer", batch: Any) -> None: ...
    def on_backward(self, trainer: "Trainer") -> None: ...
    def on_step(self, trainer: "Trainer") -> None: ...
    def on_batch_end(self, trainer: "Trainer", batch: Any) -> None: ...
    def on_loop_end(self, trainer: "Trainer") -> None: ...


@named_class_logger("trainer.checkpoint")
class Checkpoint(Callback):
    """Where checkpoints go, and every how many steps; the loss is in a file beside them.

    save_initial_checkpoint: whether one is saved before the first step.
    """

    logger: Any

    def __init__(self, steps: int, save_initial_checkpoint: bool = False) -> None:
        self.steps = steps
        self.save_initial_checkpoint = save_initial_checkpoint

    def on_setup(self, trainer: "Trainer") -> None:
        if trainer.backend.is_csx and S3Writer.is_valid_path(str(trainer.folder)):
            trainer.backend.cluster.check_storage_connectivity()

    def path(self, trainer: "Trainer") -> str:
        path = str(trainer.folder / f"checkpoint_{trainer.global_step}.mdl")
        assert StorageWriter.is_valid_path(path)
        assert base_storage.StorageDeleter.is_valid_path(path)
        assert not StorageWriter.path_exists(path)
        return path

    def save(self, state: dict[str, Any], path: str) -> None:
        with serializers.use_external_link(False):
            cstorch.save(state, path)
        with serializers.cache_deferred_tensors(False):
            assert cstorch.load(path).keys() == state.keys()
        self.logger.info("Saved %s, %s", path, bytes_to_human(Path(path).stat().st_size))


class Norms(Callback):
    """The norms of the weights that a filter chooses, and of their gradients."""

    def __init__(self, names: list[str] | None = None) -> None:
        self.filter: FilterCallable = make_param_filter(names or ["*"])

    def on_backward(self, trainer: "Trainer") -> None:
        with cstorch.name_scope("norms"):
            total = torch.tensor(0.0).to(trainer.model.device)
            for name, parameter in trainer.model.named_parameters():
                if self.filter(name, parameter) and parameter.grad is not None:
                    total += torch.pow(torch.norm(parameter.grad), 2.0)
            trainer.log(gradient_norm=torch.sqrt(total))


class Rates(Callback):
    """Samples per second, and how many there were."""

    def __init__(self) -> None:
        self.tracker = cstorch.utils.tracker.RateTracker()
        self.flops: Any = None

    def on_batch(self, trainer: "Trainer", batch: Any) -> None:
        self.count(trainer, infer_batch_size(batch))

    @cstorch.step_closure
    def count(self, trainer: "Trainer", samples: int | None) -> None:
        if trainer.executor.iteration == 0:
            self.tracker.reset()
        self.tracker.add(samples or 0)
        appliance = current_backend_impl().appliance  # type: ignore[union-attr]
        if appliance and appliance.compile_resp:
            self.flops = appliance.compile_resp.perf_info.algo_flops
        trainer.log(rate=self.tracker.rate(), global_rate=self.tracker.global_rate())

    def on_loop_end(self, trainer: "Trainer") -> None:
        assert trainer.executor.on_final_iteration
        assert trainer.executor.user_iteration > trainer.executor.num_steps
        figures = {"total_samples": self.tracker.total_count}
        (trainer.executor.artifact_dir / "performance.json").write_text(json.dumps(figures))


class Listening(Callback):
    """Writes down the tensors of the first step by name, and counts those that come from the cluster."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.received = 0

    def on_loop(self, trainer: "Trainer", stack: Any) -> None:
        def count(tensor: torch.Tensor, name: str) -> None:
            self.received += 1

        self.names.clear()
        hooks: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
            (register_traced_tensor_hook, lambda tensor, name: self.names.append(name)),
            (register_after_tensor_to_cpu, count),
        ]
        for register, hook in hooks:
            stack.callback(register(hook).remove)
        stack.enter_context(profiler.profile(schedule=profiler.schedule(start_step=-1, end_step=-1)))

    def on_loop_end(self, trainer: "Trainer") -> None:
        (trainer.executor.artifact_dir / "tensors.txt").write_text("\n".join(self.names))
        assert bool(self.received) is trainer.backend.is_csx


class Telemetry(Callback):
    """Figures for the cluster's operators."""

    def __init__(self, max_buffer_size: int = 8) -> None:
        self.max_buffer_size = max_buffer_size

    def on_loop(self, trainer: "Trainer", stack: Any) -> None:
        if trainer.backend.is_csx:
            client = stack.enter_context(TelemetryClient(trainer.backend.cluster.client, self.max_buffer_size))
            client.push({"steps": float(trainer.global_step)}, labels={"step": str(trainer.global_step)})


class Scale(Callback):
    """A dynamic loss scale, which it watches behind the step; and what else a script computes there for its logs."""

    def __init__(self, init_scale: float = 1024.0, min_loss_scale: float = 1.0) -> None:
        self.settings = {"init_scale": init_scale, "min_loss_scale": min_loss_scale, "steps_per_increase": 3}
        self.scaler: cstorch.amp.GradScaler
        self.recent: Any = 0.0

    def on_setup(self, trainer: "Trainer") -> None:
        self.scaler = trainer.scaler = cstorch.amp.GradScaler("dynamic", **self.settings)

    def on_batch_end(self, trainer: "Trainer", batch: Any) -> None:
        trainer.log(loss_scale=self.scaler.get_scale())
        self.check(self.scaler.get_scale(), self.scaler.get_non_clamped_scale())
        self.recent = 0.5 * self.recent + 0.5 * trainer.returned.detach().float()
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        self.note(trainer, self.recent, rates, trainer.schedulers[0].get_last_value(), batch["labels"])

    @cstorch.step_closure
    def check(self, scale: Any, unbounded: Any) -> None:
        if unbounded < scale:
            raise ApplianceNanError("the loss scale is below its bound")

    @cstorch.step_closure
    def note(self, trainer: "Trainer", recent: Any, rates: list[Any], rate: Any, labels: torch.Tensor) -> None:
        assert float(rates[0]) == float(rate)
        trainer.log(recent_loss=recent, rate_behind=rates[0], labels=labels.double().mean())


class Remaining(Callback):
    """How long the loop takes for a batch: from the time at which values of one arrive to that of the next."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_loop(self, trainer: "Trainer", stack: Any) -> None:
        self.times.clear()
        stack.callback(register_after_tensor_to_cpu(self.arrived).remove)

    def arrived(self, tensor: torch.Tensor, name: str) -> None:
        self.times[-1] = time.time()

    def on_batch(self, trainer: "Trainer", batch: Any) -> None:
        self.begin(trainer)

    @cstorch.step_closure
    def begin(self, trainer: "Trainer") -> None:
        self.times.append(0.0 if trainer.backend.is_csx else time.time())

    def on_step(self, trainer: "Trainer") -> None:
        self.look(trainer.loss)

    @cstorch.step_closure
    def look(self, loss: torch.Tensor) -> None:
        assert self.times == sorted(self.times)
        assert self.times[0] > 0


class CheckLoss(Callback):
    """Ends a run whose loss is no number."""

    def on_step(self, trainer: "Trainer") -> None:
        self.check(trainer.loss)

    @cstorch.step_closure
    def check(self, loss: torch.Tensor) -> None:
        if not torch.isfinite(loss):
            raise ApplianceNanError(f"the loss is {loss.item()}")
