"""A trainer as public ones are built, on the CPU: two loops in rounds, checkpoints, resumption, configurations."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_program.configuration import configuration_of
from trainer_program.program import HERE, Settings, run
from trainer_program.trainer import backend_for

import cstorch


@pytest.fixture(autouse=True)
def no_backend() -> Iterator[None]:
    yield
    backend_for.cache_clear()


def scalars(folder: Path, name: str) -> dict[int, float]:
    """By step, as TensorBoard loads them."""
    accumulator = EventAccumulator(str(folder / "events")).Reload()
    return {event.step: event.value for event in accumulator.Scalars(name)}


def test_rounds_checkpoints_and_resumption(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    trainer = run("CPU", whole)
    losses = scalars(whole, "loss")
    assert sorted(losses) == list(range(1, 9))
    assert scalars(whole, "rate_of_learning")[3] == pytest.approx(0.1)
    assert scalars(whole, "gradient_norm").keys() == losses.keys()
    assert [float(group["weight_decay"]) for group in trainer.optimizer.param_groups] == pytest.approx([0.0])
    assert scalars(whole, "validate_0/accuracy").keys() == {4, 8}
    assert {path.name for path in whole.glob("*.mdl")} == {f"checkpoint_{step}.mdl" for step in (0, 2, 4, 6, 8)}
    executions = sorted((whole / "artifacts" / "first" / "executors").glob("0*"))
    assert [(folder / "performance.json").exists() for folder in executions] == [True] * 4
    assert "model.into" in (executions[0] / "tensors.txt").read_text().splitlines()
    assert (whole / "cs_events" / "metadata.json").exists()

    cstorch.close_backend()
    backend_for.cache_clear()
    rest = tmp_path / "rest"
    run("CPU", rest, load_from=str(whole / "checkpoint_6.mdl"))
    assert scalars(rest, "loss") == {step: loss for step, loss in losses.items() if step > 6}
    assert scalars(rest, "validate_0/accuracy")[8] == scalars(whole, "validate_0/accuracy")[8]


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"AdamW": {"beta": 0.9}}},
        {"optimizer": {"AdamW": {"lr": "fast"}}},
        {"schedulers": [{"SequentialLR": {"schedulers": [{"LinearLR": {}}], "milestones": []}}]},
        {"schedulers": [{"ConstantWD": {"learning_rate": 0.1}}]},
        {"callbacks": [{"Norms": {"names": 3}}]},
    ],
)
def test_wrong_settings_are_found_before_anything_runs(change: dict[str, object]) -> None:
    settings = {**yaml.safe_load((HERE / "program.yaml").read_text()), **change}
    with pytest.raises(ValidationError):
        Settings(**settings)


@pytest.mark.parametrize("name", cstorch.optim.__all__)
def test_every_optimizer_has_a_configuration(name: str) -> None:
    cls = getattr(cstorch.optim, name)
    if isinstance(cls, type) and cls is not cstorch.optim.Optimizer:
        assert configuration_of(cls).model_fields.keys() >= {"params", "lr"}
