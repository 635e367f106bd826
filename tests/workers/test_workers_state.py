"""The state of a restartable loader, in the child of a worker, as of the steps for which it is wanted."""

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from workers.child import batches, loader_state
from workers.child.batches import Selection, endless
from workers.child.failures import InputFailure
from workers.child.loader_state import Position, plain

ROWS = 2
LENGTH = 5  # batches of a pass


class Counting:
    """A restartable loader: batch n of all passes holds n."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows
        self.count = 0
        self.told: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(LENGTH - self.count % LENGTH if self.count % LENGTH or self.count == 0 else LENGTH):
            batch = torch.full((self.rows,), float(self.count))
            self.count += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        self.told.append(json.loads(os.environ["WAFERBOX_WORKER_STATE"]))
        return {"count": self.count}


class Files:
    """What the child sends."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}

    def send_file(self, descriptor: int, **message: Any) -> None:
        assert message["kind"] == "state"
        self.states[message["step"]] = json.loads(os.pread(descriptor, 10_000, 0))


def run(
    loader: Counting, worker: int, num_workers: int, wanted: set[int], num_steps: int
) -> tuple[list[int], dict[int, Any]]:
    """The batches that the worker takes, and the states that it sends, asked as workers/worker_program.py asks."""
    prepare = {"wafer": 0, "worker": worker, "num_workers": num_workers, "num_csx": 1}
    member = {"dtype": "float32", "shape": [ROWS], "offset": 0}
    files = Files()
    position = Position(loader, files, prepare, [step for step in range(1, worker + 1) if step in wanted])
    load = {"members": [member], "global_rows": ROWS, "local_rows": ROWS, "micro_batches": 1}
    selection = Selection(prepare, load, "input_fn")
    batches = selection.own(endless(loader, num_workers), position)
    taken = []
    for step in range(worker + 1, num_steps + 1, num_workers):
        taken.append(int(next(batches)[0][0]))
        position.wanted = [later for later in range(step, step + num_workers) if later in wanted]
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


def test_what_a_state_cannot_be_made_of() -> None:
    with pytest.raises(InputFailure, match="holds a object, which cannot be saved"):
        plain({"a": [object()]})
    with pytest.raises(InputFailure, match="holds a ndarray"):
        plain(np.array([object()]))


class Large(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"order": torch.zeros(loader_state.STATE_BYTES, dtype=torch.uint8)}


class Raising(Counting):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no position yet")


@pytest.mark.parametrize(
    ("loader", "message"),
    [(Large(), "a seed and a count are enough"), (Raising(), "state_dict raised ValueError: no position yet")],
)
def test_states_that_are_refused(loader: Counting, message: str) -> None:
    with pytest.raises(InputFailure, match=message):
        run(loader, 0, 1, {1}, 2)
