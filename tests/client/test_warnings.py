"""Warnings: what a script may do, and what it may not know of it."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster
from user_script import Script

import cstorch
from cstorch.errors import UsageError
from cstorch.utils.data import DataExecutor, DataLoader
from waferbox import execution_folders


def test_a_python_value_that_changes_is_warned_of_once(cluster: FakeCluster, tmp_path: Path) -> None:
    """Seed 001: variables that are not torch tensors will only see their first value."""
    script = Script(tmp_path, cluster)

    @cstorch.trace
    def step(batch: Any, settings: dict[str, Any], number: float) -> torch.Tensor:
        return script.train(batch) * number

    numbers = iter([(1, 0.5), (2, 0.5), (3, 0.7)])

    def body(batch: Any) -> None:
        count, number = next(numbers)
        step(batch, {"count": count, "same": None}, number=number)

    with pytest.warns(UserWarning, match="is 2, and was 1 in the first step.*must be a tensor") as caught:
        script.loop(body, num_steps=3)
    (message,) = [str(item.message) for item in caught if "first step" in str(item.message)]
    assert r"test_warnings.py:" in message
    assert "settings['count']" in message


@pytest.mark.parametrize("value", [None, True, "text", float("nan"), 3])
def test_python_values_that_stay_are_not_warned_of(cluster: FakeCluster, tmp_path: Path, value: Any) -> None:
    script = Script(tmp_path, cluster)
    step = cstorch.trace(lambda batch, value: script.train(batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.loop(lambda batch: step(batch, value), num_steps=3)


def test_an_evaluation_in_training_mode_is_warned_of(tmp_path: Path) -> None:
    script = Script(tmp_path)
    evaluate = cstorch.trace(lambda batch: script.compiled(batch).sum())
    with pytest.warns(UserWarning, match=r"in training mode.*model.eval\(\)"):
        script.loop(evaluate)
    script.model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.loop(evaluate)


def test_parameters_that_a_step_updates_by_itself_are_trained(cluster: FakeCluster, tmp_path: Path) -> None:
    script = Script(tmp_path, cluster)

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = script.compiled(batch).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in script.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.loop(step)
    (record,) = tmp_path.rglob(execution_folders.RECORD)
    assert json.loads(record.read_text())["stage"] == "train"


def test_an_optimizer_of_torch_is_warned_of(tmp_path: Path) -> None:
    """Seed 001: the optimizers of core PyTorch are not supported."""
    script = Script(tmp_path)
    script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="SGD is an optimizer of torch.*Use the optimizer of the same name"):
        script.loop(cstorch.trace(script.train))


def test_an_optimizer_of_the_script_has_no_other_of_its_name(tmp_path: Path) -> None:
    class Sign(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.add_(parameter.grad.sign(), alpha=-0.1)

    script = Script(tmp_path)
    script.optimizer = Sign(script.model.parameters(), {})
    with pytest.warns(UserWarning, match="Sign is an optimizer of the script.*subclass of cstorch.optim.Optimizer"):
        script.loop(cstorch.trace(script.train))


def test_a_rate_that_a_count_of_steps_in_python_sets_is_refused(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.optimizer = torch.optim.Adagrad(script.model.parameters(), lr_decay=0.5)
    with pytest.raises(UsageError, match=r"lr_decay counts steps in Python.*Use the optimizer of the same name"):
        script.loop(cstorch.trace(script.train))


def test_training_after_an_evaluation_is_warned_of(cluster: FakeCluster, tmp_path: Path) -> None:
    """Seed 000: the first compile should be the most resource-intensive job: training must come before eval."""
    script = Script(tmp_path, cluster)
    evaluate = cstorch.trace(lambda batch: script.compiled(batch).sum())
    script.model.eval()
    script.loop(evaluate)
    script.model.train()
    with pytest.warns(UserWarning, match="compiled after an evaluation.*train before you evaluate"):
        script.loop(script.step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.loop(script.step)


def test_steps_and_activations_are_warned_of(tmp_path: Path) -> None:
    Script(tmp_path)
    loader = DataLoader(lambda: [torch.ones(4, 2)])
    with pytest.warns(UserWarning, match="with validate_only one step is traced: num_steps=9 becomes 1"):
        DataExecutor(loader, num_steps=9)
    cstorch.close_backend()
    cstorch.backend("CPU", artifact_dir=tmp_path)
    with pytest.warns(UserWarning, match="activation_steps=4 becomes 2: every checkpoint step is an activation step"):
        DataExecutor(loader, num_steps=9, checkpoint_steps=6, activation_steps=4)
