"""The state of a restartable loader, in the child of a worker, as of the steps for which it is wanted."""

import json
import os
from collections.abc import Iterator
from typing import Any

import dill
import numpy as np
import pytest
import torch
from input_messages import layout_of, prepare_of

from waferbox.input_process import batches, messages
from waferbox.input_process.batches import Selection, endless
from waferbox.input_process.failures import InputFailure
from waferbox.input_process.loader import Position, plain, resume
from waferbox.input_process.messages import Channel, Message, State, TensorLayout

ROWS = 2
LENGTH = 5  # batches of a pass


class Counting:
    """A restartable loader: batch n of all passes holds n."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows
        self.count = 0
        self.told: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(LENGTH - self.count % LENGTH):
            batch = torch.full((self.rows,), float(self.count))
            self.count += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        self.told.append(json.loads(os.environ["WAFERBOX_WORKER_STATE"]))
        return {"count": self.count}


class Files(Channel):
    """What the child sends."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}

    def send(self, message: Message, *descriptors: int) -> None:
        assert isinstance(message, State)
        (descriptor,) = descriptors
        text = os.pread(descriptor, 10_000, 0)
        self.states[message.step] = json.loads(text) if text else None


def run(
    loader: Counting,
    worker: int,
    num_workers: int,
    wanted: set[int],
    num_steps: int,
    *,
    done_steps: int = 0,
    is_resumed: bool = False,
    recovery_step: int = 0,
    is_vendors: bool = False,
) -> tuple[list[int], dict[int, Any]]:
    """The batches that the worker takes, and the states that it sends, asked as workers/worker_program.py asks."""
    prepare = prepare_of(worker=worker, num_workers=num_workers, vendor_builder=is_vendors)
    files = Files()
    first_step, num_skipped = (done_steps, 0) if is_resumed else (0, done_steps // num_workers)
    before = [step for step in range(done_steps + 1, done_steps + worker + 1) if step in wanted]
    position = Position(loader, files, prepare, before, first_step)
    layout = layout_of([TensorLayout(dtype="float32", shape=(ROWS,), offset=0)], ROWS, ROWS)
    selection = Selection(prepare, layout, "input_fn")
    batches = selection.own(endless(loader, num_workers), position, num_skipped)
    taken = []
    for step in range(done_steps + worker + 1, num_steps + 1, num_workers):
        taken.append(int(next(batches)[0][0]))
        position.state_steps = [later for later in range(step, step + num_workers) if later in wanted]
        position.recovery_step = recovery_step if step <= recovery_step < step + num_workers else 0
    next(batches)  # always one batch ahead
    return taken, files.states


@pytest.mark.parametrize("wanted", [{1, 2, 3, 4, 5, 6, 7}, {2, 7}, {7}, {1}])
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_where_batches_are_dealt_out_every_worker_stands_behind_the_batch_of_the_step(
    worker: int, wanted: set[int]
) -> None:
    taken, states = run(Counting(), worker, 3, wanted, 7)
    assert taken == list(range(worker, 7, 3))
    assert states == {step: ["dict", ["count", step]] for step in wanted}


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_where_the_input_fn_shards_a_worker_stands_behind_its_own_batch(
    worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_rank_was_asked", lambda: True)
    loader = Counting()
    taken, states = run(loader, worker, 3, set(range(1, 8)), 7)
    assert taken == list(range(len(range(worker, 7, 3))))
    own = {step: len(range(worker + 1, step + 1, 3)) for step in range(1, 8)}
    assert states == {step: ["dict", ["count", count]] for step, count in own.items()}
    for told in loader.told:
        step = told["appliance_step"]
        assert (told["worker_step"], told["samples_streamed"]) == (own[step], own[step] * ROWS)
        assert (told["local_worker_id"], told["num_workers_per_csx"]) == (worker, 3)
    assert "WAFERBOX_WORKER_STATE" not in os.environ


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("done_steps", [3, 6, 18])
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_batches_that_are_skipped_count_as_if_they_had_been_supplied(
    worker: int, done_steps: int, is_sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_rank_was_asked", lambda: is_sharded)
    whole, rest = Counting(), Counting()
    wanted = set(range(1, 25))
    expected, expected_states = run(whole, worker, 3, wanted, 24)
    taken, states = run(rest, worker, 3, wanted - set(range(done_steps + 1)), 24, done_steps=done_steps)
    assert taken == expected[done_steps // 3 :]
    assert states == {step: state for step, state in expected_states.items() if step > done_steps}
    assert rest.told == [told for told in whole.told if told["appliance_step"] > done_steps]


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_loader_that_is_resumed_is_told_what_a_new_execution_would_tell_it(
    worker: int, is_sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_rank_was_asked", lambda: is_sharded)
    done_steps, later = 6, {7, 8, 9, 10, 11, 12}
    whole, rest = Counting(), Counting()
    expected, expected_states = run(whole, worker, 3, later, 12)
    rest.count = done_steps // 3 if is_sharded else done_steps
    taken, states = run(rest, worker, 3, later, 12, done_steps=done_steps, is_resumed=True)
    assert taken == expected[done_steps // 3 :]
    assert states == expected_states
    assert sorted({told["appliance_step"] for told in rest.told}) == [1, 2, 3, 4, 5, 6]
    assert rest.told[-1]["worker_step"] == whole.told[-1]["worker_step"] - done_steps // 3


@pytest.mark.parametrize("worker", [0, 1, 2])
@pytest.mark.parametrize("step", [4, 5, 6])
def test_a_recovery_point_has_the_state_of_a_loader_that_can_be_resumed(worker: int, step: int) -> None:
    assert run(Counting(), worker, 3, set(), 9, recovery_step=step)[1] == {step: None}
    assert run(Resumable(), worker, 3, set(), 9, recovery_step=step)[1] == {step: ["dict", ["count", step]]}
    assert run(Resumable(), worker, 3, {step}, 9, recovery_step=step)[1] == {step: ["dict", ["count", step]]}
    # What a checkpoint would be refused for does not end the steps.
    assert run(LargeResumable(), worker, 3, set(), 9, recovery_step=step)[1] == {step: None}


def test_a_resumed_loader_gets_what_it_makes_of_the_states_of_all() -> None:
    state: dict[object, Any] = {
        "a": [1, (2.5, None)],
        3: b"bytes",
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "none": torch.empty((0, 4)),
        "array": np.arange(4, dtype=np.int16).reshape(4, 1),
    }
    loader = Resumable()
    text = json.dumps(plain(state)).encode()
    resume(loader, b"[" + text + b"," + json.dumps(plain({"count": 7})).encode() + b"]", is_vendors=False)
    first, second = loader.loaded["of all"]
    assert second == {"count": 7}
    assert first.keys() == state.keys()
    assert (first["a"], first[3]) == (state["a"], state[3])
    for name in ("tensor", "none"):
        assert first[name].dtype == state[name].dtype
        assert torch.equal(first[name], state[name])
    assert first["array"].dtype == np.int16
    assert (first["array"] == state["array"]).all()
    with pytest.raises(InputFailure, match="the loader could not be resumed: KeyError"):
        resume(Raising(), b'[["dict"]]', is_vendors=False)


@pytest.mark.parametrize("worker", [0, 1])
def test_the_vendors_client_is_sent_what_its_dill_reads(worker: int) -> None:
    loader = Resumable()
    _, states = run(loader, worker, 2, {2, 5}, 5, recovery_step=4, is_vendors=True)
    read = {step: dill.loads(bytes.fromhex(text)) for step, text in states.items()}  # noqa: S301 - just made
    assert {step: state.user_state_dict for step, state in read.items()} == {
        step: {"count": step} for step in (2, 4, 5)
    }
    assert [read[step].appliance_step for step in (2, 4, 5)] == [2, 4, 5]
    resumed = Resumable()
    resume(resumed, json.dumps([states[2], states[5]]).encode(), is_vendors=True)
    assert resumed.loaded == {"of all": [{"count": 2}, {"count": 5}]}
    # It does not say whether it will ask, and a loader of that kind it will not ask.
    assert run(Counting(), worker, 2, {2, 5}, 5, is_vendors=True)[1] == {2: None, 5: None}


def test_what_a_state_cannot_be_made_of() -> None:
    with pytest.raises(InputFailure, match="holds a object, which cannot be saved"):
        plain({"a": [object()]})
    with pytest.raises(InputFailure, match="holds a ndarray"):
        plain(np.array([object()]))


class Large(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"order": torch.zeros(messages.STATE_BYTES, dtype=torch.uint8)}


class Raising(Counting):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no position yet")

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"all": worker_states[0]["count"]}


class Resumable(Counting):
    """Is resumed with what all workers have said."""

    loaded: dict[str, Any]

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"all": worker_states}

    def deaggregate_state_dict(self, aggregated_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {"of all": aggregated_state_dict["all"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class LargeResumable(Large, Resumable):
    """Its state is too large for a checkpoint."""


@pytest.mark.parametrize(
    ("loader", "message"),
    [(Large(), "a seed and a count are enough"), (Raising(), "state_dict raised ValueError: no position yet")],
)
def test_states_that_are_refused(loader: Counting, message: str) -> None:
    with pytest.raises(InputFailure, match=message):
        run(loader, 0, 1, {1}, 2)
