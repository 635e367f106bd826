"""DataLoader.state_dict and load_state_dict on the CPU backend, and states as workers send them."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cstorch
from cstorch._internal.session.execution.input import read_state
from cstorch.distributed import get_worker_state
from cstorch.errors import InputError, UsageError
from cstorch.utils.data import DataExecutor, DataLoader, RestartableDataLoader
from waferbox.input_process.loader import plain  # the form is that in which workers write

LENGTH = 4


@pytest.fixture(autouse=True)
def _cpu_backend(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)


class Numbers:
    """Batches 0, 1, 2, ...; a pass has LENGTH of them."""

    count = 0
    strict = True

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            batch, self.count = torch.full((3,), float(self.count)), self.count + 1
            yield batch
            if self.count % LENGTH == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        told = get_worker_state()
        return {"count": self.count, "samples": told.samples_streamed, "step": told.worker_step}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self.count, self.strict = state_dict["count"], strict

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        (state,) = worker_states
        return {**state, "workers": 1}

    def deaggregate_state_dict(self, aggregated_state_dict: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        assert aggregated_state_dict["workers"] == 1
        return aggregated_state_dict


def run(loader: DataLoader, num_steps: int, checkpoint_steps: int | None = None) -> tuple[list[float], dict[int, Any]]:
    states: dict[int, Any] = {}

    @cstorch.checkpoint_closure
    def note(step: int) -> None:
        states[step] = loader.state_dict()

    batches = []
    executor = DataExecutor(loader, num_steps=num_steps, checkpoint_steps=checkpoint_steps)
    for batch in executor:
        batches.append(batch[0].item())
        note(executor.user_iteration)
    return batches, states


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_loader_goes_on_where_it_was(step: int) -> None:
    loader = DataLoader(Numbers)
    assert loader.is_restartable
    _, states = run(loader, 6, checkpoint_steps=2)
    assert states[step] == {"count": step, "samples": 3 * step, "step": step, "workers": 1}
    again = DataLoader(Numbers)
    again.load_state_dict(states[step])
    assert run(again, 6)[0] == list(range(step, step + 6))
    assert again.state_dict()["count"] == step + 6


@pytest.mark.parametrize("checkpoint_steps", [None, 2])
def test_an_execution_begins_where_the_one_before_has_ended(checkpoint_steps: int | None) -> None:
    loader, other = DataLoader(Numbers), DataLoader(Numbers)
    for number, (begin, num_steps) in enumerate(((0, 3), (3, 1), (4, 6), (10, 2))):
        assert loader.first_batch()[0].item() == begin
        assert run(loader, num_steps, checkpoint_steps)[0] == list(range(begin, begin + num_steps))
        assert loader.state_dict()["count"] == begin + num_steps
        assert run(other, 1)[0] == [number]  # it has its own place
    loader.load_state_dict({"count": 1, "workers": 1})
    assert run(loader, 2)[0] == [1, 2]
    assert run(copy.copy(loader), 1)[0] == run(loader, 1)[0] == [3]
    plain = DataLoader(lambda: [torch.full((3,), float(number)) for number in range(4)])
    assert [run(plain, 3)[0], run(plain, 5)[0]] == [[0, 1, 2], [0, 1, 2, 3, 0]]  # every loop is a new pass


def test_an_execution_that_was_left_early_does_not_count() -> None:
    loader = DataLoader(Numbers)
    run(loader, 3)
    for _ in DataExecutor(loader, num_steps=3):
        break
    with pytest.raises(UsageError, match="ask in a @checkpoint_closure"):
        loader.state_dict()
    assert run(loader, 3)[0] == [3, 4, 5]


def test_strict_reaches_the_loader() -> None:
    loader = DataLoader(Numbers)
    loader.load_state_dict({"count": 3, "workers": 1}, strict=False)
    run(loader, 1)
    assert isinstance(loader._loader, Numbers)
    assert loader._loader.strict is False


def test_when_there_is_no_state() -> None:
    loader = DataLoader(Numbers)
    for _ in DataExecutor(loader, num_steps=2, checkpoint_steps=2):
        with pytest.raises(UsageError, match="step 1 is no checkpoint step"):
            loader.state_dict()
        with pytest.raises(UsageError, match="the loop over this input has begun"):
            loader.load_state_dict({})
        break
    with pytest.raises(UsageError, match="ask in a @checkpoint_closure"):
        loader.state_dict()
    with pytest.raises(UsageError, match="inside the state_dict of your RestartableDataLoader"):
        get_worker_state()


def test_a_loader_that_cannot_be_restarted() -> None:
    samples: Any = [torch.zeros(2)]
    loader = DataLoader(lambda: torch.utils.data.DataLoader(samples))
    assert not loader.is_restartable
    with pytest.raises(UsageError, match=r"the loader that the input_fn .*lambda.* cannot be restarted: give it"):
        loader.load_state_dict({})
    for _ in DataExecutor(loader, num_steps=1, checkpoint_steps=1):
        with pytest.raises(UsageError, match="cannot be restarted"):
            loader.state_dict()
    assert isinstance(Numbers(), RestartableDataLoader)


def test_states_come_as_they_were() -> None:
    state: dict[Any, Any] = {
        "none": None,
        "numbers": [1, -(2**70), 1.5, math.inf, True, "text \ud800"],
        3: (np.int64(7), b"\x00\xff", ()),
        "tensors": [torch.arange(6).reshape(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 4)],
        "array": np.array([[1.0, np.nan]]),
        "nested": {"list": ["dict", ["tuple"]]},
    }
    read = read_state(json.dumps(plain(state)).encode())
    assert list(read) == list(state)
    assert read["none"] is None
    assert read["numbers"] == state["numbers"]
    assert read[3] == (7, b"\x00\xff", ())
    for one, other in zip(read["tensors"], state["tensors"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert np.array_equal(read["array"], state["array"], equal_nan=True)
    assert read["nested"] == state["nested"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b'["object", "os.system"]',
        b'["tensor", "load", [1], "AAAAAA=="]',
        b'["tensor", "float32", [1000000000], "AAAAAA=="]',
        b'["tensor", "float32", [-1, -1], "AAAAAA=="]',
        b'["array", "O", [0], ""]',
        b'["bytes", "%"]',
        b'["dict", [["list"], 1]]',
        b"[" * 100_000,
    ],
    ids=range(11),
)
def test_other_text_is_refused(text: bytes) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_state(text)
