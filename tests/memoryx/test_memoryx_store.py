"""Where states lie, what survives a new plan, and snapshots."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from waferbox.links.hub import Stopped
from waferbox.states.layout import StateRequirements, fit, lay_out
from waferbox.states.state_memory import StateMemory, StateSettings
from waferbox.states.store import Snapshot, Snapshots, StateStore
from wsc.v1 import plan_pb2


def f32(*shape: int) -> plan_pb2.TensorType:
    return plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=shape)


def required(states: dict[str, tuple[int, ...]], groups: list[list[str | None]]) -> StateRequirements:
    """Groups of states that are sent; None is a value that is computed. Values are numbered as the states are."""
    values = {name: number for number, name in enumerate(states, 1)}
    slots = [plan_pb2.StateSlot(value=values[n], name=n, type=f32(*shape)) for n, shape in states.items()]
    sent = []
    for number, names in enumerate(groups, 1):
        group = plan_pb2.Group(id=number, kind=plan_pb2.GROUP_KIND_WEIGHTS)
        for name in names:
            shape = states[name] if name is not None else (3,)
            group.members.add(value=values[name] if name else 99, type=f32(*shape), offset=group.nbytes)
            group.nbytes += 128
        sent.append(group)
    return StateRequirements(slots=slots, weights_groups=sent)


def value_of(snapshot: Snapshot, name: str) -> torch.Tensor:
    """A vector of a snapshot."""
    part = snapshot.part(name, 0, snapshot.extents[name].nbytes)
    return part.memory.tensor(torch.float32, snapshot.extents[name].shape, part.offset)


STATES = {"a": (4,), "b": (2, 5), "c": (), "d": (7,)}


def test_groups_lie_in_one_piece_in_the_order_of_sending() -> None:
    layout = lay_out(required(STATES, [["d", "b"], ["a", None]]), {})
    assert layout.extents["b"].offset == layout.group_bases[1] + 128
    assert layout.extents["d"].offset == layout.group_bases[1]
    assert layout.extents["a"].offset == layout.group_bases[2] == 256
    assert layout.extents["c"].offset == 512
    assert layout.nbytes >= 516


def test_group_that_is_sent_again_is_not_copied_if_it_lies_there() -> None:
    layout = lay_out(required(STATES, [["a", "b"], ["b"], ["b", "a"]]), {})
    assert layout.group_bases[2] == layout.extents["b"].offset
    assert layout.group_bases[3] not in (0, 128)


def test_plan_that_fits_keeps_everything_where_it_is() -> None:
    layout = lay_out(required(STATES, [["a", "b"], ["d"]]), {})
    evaluation = required({"b": (2, 5), "a": (4,)}, [["a", "b"]])
    fitting = fit(evaluation, layout)
    assert fitting is not None
    assert fitting.extents == layout.extents
    assert fit(required({"b": (2, 5), "a": (4,)}, [["b", "a"]]), layout) is None
    assert fit(required({"a": (5,)}, []), layout) is None
    assert fit(required({"a": (4,)}, [["a", None]]), layout) is None


@pytest.mark.parametrize("in_files", [False, True])
def test_states_survive_plans_that_do_not_name_them(tmp_path: Path, in_files: bool) -> None:
    store = StateStore(StateSettings(folder=tmp_path if in_files else None))
    assert store.load(required(STATES, [["a", "b"]])) == list(STATES)
    for name in STATES:
        store.tensor(name).fill_(ord(name))
    store.mark_written(STATES)
    assert store.load(required({"b": (2, 5), "a": (4,), "e": (1,)}, [["b", "a"]])) == ["e"]
    assert store.load(required(STATES, [["a", "b"]])) == []
    for name, shape in STATES.items():
        torch.testing.assert_close(store.tensor(name), torch.full(shape, float(ord(name))))
    assert store.load(required(STATES | {"a": (5,)}, [])) == ["a"]
    store.close()


@pytest.mark.parametrize("in_files", [False, True])
def test_a_move_has_no_state_twice(tmp_path: Path, in_files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was moved gives its room back at once, and in files it does not stay in memory either."""
    store = StateStore(StateSettings(folder=tmp_path if in_files else None))
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys("abcdefgh", (1 << 18,))
    store.load(required(shapes, []))
    for name in shapes:
        store.tensor(name).fill_(ord(name))
    store.mark_written(shapes)
    old = store.states
    discard, left = StateMemory.discard, []

    def spy(memory: StateMemory, extent: tuple[int, int]) -> None:
        discard(memory, extent)
        # In whole tensors of 1 MiB: a file system counts the blocks in which it keeps a file's extents as well.
        left.append(os.fstat(memory.memory.fileno()).st_blocks * 512 >> 20)

    monkeypatch.setattr(StateMemory, "discard", spy)
    store.load(required(shapes | {"i": (3,)}, []))
    assert store.states is not old
    assert left == list(reversed(range(len(shapes))))
    if store.states.pages is not None:
        assert store.states.pages.resident_bytes(0, store.states.nbytes) <= 1 << 20
    for name in shapes:
        assert (store.tensor(name) == ord(name)).all()
    store.close()


def test_snapshot_waits_for_the_one_before() -> None:
    store = StateStore()
    store.load(required({"a": (4,)}, []))
    store.mark_written(["a"])
    announced: list[int] = []
    snapshots = Snapshots(store, announced.append)
    snapshots.take(2)
    store.before_write(["a"])
    store.tensor("a").fill_(5.0)
    with snapshots.reading(2) as snapshot:
        assert value_of(snapshot, "a").sum() == 0
    with pytest.raises(KeyError), snapshots.reading(4):
        pass
    thread = threading.Thread(target=snapshots.take, args=(4,))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    snapshots.release(2)
    thread.join(10)
    assert announced == [2, 4]
    with snapshots.reading(4) as snapshot:
        assert value_of(snapshot, "a").sum() == 20
    snapshots.interrupt()
    with pytest.raises(Stopped):
        snapshots.take(6)
    snapshots.reset()
    snapshots.take(6)
    snapshots.reset()
    store.close()


def test_a_release_does_not_wait_for_those_who_read() -> None:
    """The command thread of the node releases; a client that is suspended may read for ever."""
    store = StateStore()
    store.load(required({"a": (4,)}, []))
    snapshots = Snapshots(store, lambda step: None)
    snapshots.take(1)
    with snapshots.reading(1) as snapshot:
        for give_up in (lambda: snapshots.release(1), snapshots.reset):
            thread = threading.Thread(target=give_up, daemon=True)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
        with pytest.raises(KeyError), snapshots.reading(1):
            pass
        again = threading.Thread(target=snapshots.take, args=(2,), daemon=True)
        again.start()
        assert snapshot.aside.nbytes > 0  # not taken for the next
        assert again.is_alive()
    again.join(10)
    with snapshots.reading(2) as other:
        assert other.aside is snapshot.aside
    snapshots.reset()
    store.close()


def test_states_are_known_in_the_order_in_which_a_step_writes_them() -> None:
    """A recovery point is written in this order, so that little is copied aside."""
    store = StateStore()
    store.load(replace(required(STATES, [["a", "b"]]), write_order=["c", "b"]))
    store.mark_written(["a", "c", "d"])
    assert list(store.begin_recovery_point(required=True).extents) == ["c", "a", "d"]
    store.close()
