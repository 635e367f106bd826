"""Executors, schedules and loaders, run on the CPU backend."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

import cstorch
from cstorch.errors import ConfigurationError, InputError, UsageError
from cstorch.utils.data import DataExecutor, DataLoader, Schedule


@pytest.fixture(autouse=True)
def _cpu_backend(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)


def input_fn(rows: int = 10, batch_size: int = 4, **settings: Any) -> TorchLoader[Any]:
    features = torch.arange(rows, dtype=torch.float32).reshape(rows, 1)
    return TorchLoader(TensorDataset(features), batch_size=batch_size, **settings)


def test_loop_goes_over_the_epochs() -> None:
    executor = DataExecutor(DataLoader(input_fn), num_steps=7)
    firsts = [batch[0][0].item() for batch in executor]
    assert firsts == [0, 4, 8, 0, 4, 8, 0]


def test_length_of_the_loader_is_the_default_and_asking_for_it_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    executor = DataExecutor(DataLoader(input_fn, shuffle=True))
    assert len(executor) == 3
    assert torch.equal(before, torch.get_rng_state())


def test_shuffled_batches_are_those_of_a_plain_loop() -> None:
    torch.manual_seed(5)
    plain = [batch[0] for _ in range(2) for batch in input_fn(shuffle=True)]
    torch.manual_seed(5)
    executor = DataExecutor(DataLoader(input_fn, shuffle=True), num_steps=6)
    for mine, theirs in zip(executor, plain, strict=True):
        assert torch.equal(mine[0], theirs)


def test_first_batch_leaves_the_generators_as_a_plain_loop_does() -> None:
    def augmented() -> Iterator[Any]:
        for _ in range(3):
            yield torch.rand(2) + float(np.random.rand()) + random.random()

    def seed() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    seed()
    plain = next(augmented())
    after = (torch.rand(1), np.random.rand(), random.random())
    seed()
    assert torch.equal(DataLoader(augmented).first_batch(), plain)
    assert (torch.rand(1), np.random.rand(), random.random()) == after


def test_builder_holds_the_recipe_and_the_generators() -> None:
    import cloudpickle

    torch.manual_seed(3)
    expected = torch.get_rng_state()
    recipe = cloudpickle.loads(DataLoader(input_fn, 10, batch_size=5).builder())
    assert recipe["args"] == (10,)
    assert recipe["kwargs"] == {"batch_size": 5}
    assert len(recipe["input_fn"](*recipe["args"], **recipe["kwargs"])) == 2
    assert recipe["random_state"]["torch"] == expected.numpy().tobytes()


def test_builder_says_what_cannot_be_sent() -> None:
    import threading

    lock: Any = threading.Lock()
    with pytest.raises(InputError, match=r"\(the closure variable lock of .*<lambda>\).*as arguments: DataLoader\("):
        DataLoader(lambda: lock).builder()

    def rows() -> Any:
        return lock

    with pytest.raises(InputError, match=r"input_fn .*<lambda> cannot .*\(the closure variable lock of .*rows\)"):
        DataLoader(lambda: rows()).builder()
    with pytest.raises(InputError, match=r"cannot be sent to the workers: [^(]*\. It must not hold"):
        DataLoader(input_fn, lock).builder()

    # As in a script, whose globals are pickled with its functions.
    script: dict[str, Any] = {"__name__": "__main__", "FLAGS": lock}
    exec("def inputs(): return FLAGS", script)
    with pytest.raises(InputError, match=r"\(the global FLAGS of inputs\)"):
        DataLoader(script["inputs"]).builder()


def test_a_generator_runs_dry() -> None:
    def once() -> Iterator[torch.Tensor]:
        yield torch.zeros(2)
        yield torch.ones(2)

    executor = DataExecutor(DataLoader(once), num_steps=5)
    with pytest.raises(InputError, match="ran dry after 2 batches"):
        for _ in executor:
            pass
    with pytest.raises(InputError, match="ran dry after 0 batches"):
        for _ in DataExecutor(DataLoader(list), num_steps=1):
            pass


def test_iteration_counters(tmp_path: Path) -> None:
    executor = DataExecutor(DataLoader(input_fn), num_steps=3)
    seen = []
    for _ in executor:
        assert cstorch.current_executor() is executor
        seen.append(
            (executor.iteration, executor.user_iteration, executor.is_initial_step, executor.on_final_iteration)
        )
    assert seen == [(0, 1, True, False), (1, 2, False, False), (2, 3, False, True)]
    assert executor.artifact_dir == tmp_path / "executors" / "000001"
    assert (tmp_path / "executors" / "latest").resolve() == executor.artifact_dir.resolve()
    assert executor.profiler.total_samples() == 10
    with pytest.raises(UsageError, match="no current executor"):
        cstorch.current_executor()


def test_one_loop_at_a_time() -> None:
    executor = DataExecutor(DataLoader(input_fn), num_steps=2)

    def nested() -> None:
        for _ in executor:
            list(DataExecutor(DataLoader(input_fn), num_steps=2))

    with pytest.raises(UsageError, match="another DataExecutor"):
        nested()
    assert len([*executor]) == 2  # nothing of the failed loops is left


def test_leaving_early_frees_the_executor() -> None:
    for _ in DataExecutor(DataLoader(input_fn), num_steps=5):
        break
    assert len([*DataExecutor(DataLoader(input_fn), num_steps=2)]) == 2


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_steps": 0}, ConfigurationError, "num_steps must be at least 1"),
        ({"num_steps": 1.5}, TypeError, "num_steps must be an int"),
        ({"num_steps": 2, "checkpoint_steps": -1}, ConfigurationError, "must not be negative"),
        ({"num_steps": 2, "checkpoint_steps": "all"}, TypeError, "int or a Schedule"),
        ({"num_steps": 2, "activation_steps": 0}, ConfigurationError, "activation_steps"),
    ],
)
def test_executor_says_what_is_wrong(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DataExecutor(DataLoader(input_fn), **settings)


def test_executor_wants_our_loader_and_a_length() -> None:
    with pytest.raises(TypeError, match=r"cstorch\.utils\.data\.DataLoader"):
        DataExecutor(input_fn(), num_steps=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="input_fn must be a function"):
        DataLoader(input_fn())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="give the executor num_steps"):
        DataExecutor(DataLoader(lambda: iter([torch.zeros(1)])))


def test_checkpoint_steps() -> None:
    def steps(num_steps: int, checkpoint_steps: Any) -> list[int]:
        return DataExecutor(DataLoader(input_fn), num_steps, checkpoint_steps).checkpoint_steps

    assert steps(10, 4) == [4, 8, 10]
    assert steps(10, 20) == [10]
    assert steps(10, 0) == []
    assert steps(10, None) == []
    assert steps(3, Schedule([Schedule.Range(0, 100, 2)])) == [1, 3]


def test_activation_steps_divide_the_checkpoint_steps() -> None:
    with pytest.warns(UserWarning, match="activation_steps=4 becomes 2"):
        executor = DataExecutor(DataLoader(input_fn), num_steps=20, checkpoint_steps=6, activation_steps=4)
    assert executor.activation_steps == 2
