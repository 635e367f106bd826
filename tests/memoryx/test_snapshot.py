"""A snapshot is of its step, however steps and readers interleave, and nothing is copied before it has to be."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from waferbox.states import state_memory
from waferbox.states.layout import StateRequirements
from waferbox.states.state_memory import StateSettings
from waferbox.states.store import Snapshot, Snapshots, StateStore
from wsc.v1 import plan_pb2

NAMES = [f"s{number}" for number in range(6)]
ELEMENTS = 30_000
SECONDS = 30.0


@pytest.fixture(params=["in memory", "in files"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """Copied in chunks that are small beside a state."""
    monkeypatch.setattr("waferbox.states.store.CHUNK_BYTES", 16_384)
    monkeypatch.setattr(state_memory, "CHUNK_BYTES", 16_384)
    store = StateStore(StateSettings(folder=tmp_path if request.param == "in files" else None))
    kind = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_INT32, shape=[ELEMENTS])
    store.load(
        StateRequirements(
            slots=[plan_pb2.StateSlot(value=number, name=name, type=kind) for number, name in enumerate(NAMES, 1)]
        )
    )
    for name in NAMES:
        store.tensor(name).zero_()
    store.mark_written(NAMES)
    yield store
    store.close()


def read(snapshot: Snapshot, name: str, offset: int, nbytes: int) -> torch.Tensor:
    part = snapshot.part(name, offset, nbytes)
    return part.memory.tensor(torch.int32, (nbytes // 4,), part.offset)


def test_states_are_copied_when_they_are_read_or_written_and_not_before(store: StateStore) -> None:
    copied: list[tuple[int, int]] = []
    snapshot = store.snapshot(1)
    extents = store.extents()
    copy = snapshot.aside.copy_from

    def spy(source: object, source_offset: int, offset: int, nbytes: int) -> None:
        copied.append((offset, nbytes))
        copy(store.states, source_offset, offset, nbytes)

    snapshot.aside.copy_from = spy  # type: ignore[method-assign]  # of this snapshot alone
    assert not copied
    store.before_write([NAMES[0]], (0, 3))  # a third of it, in chunks
    assert sum(nbytes for _, nbytes in copied) == 3 * 16_384
    assert copied[0][0] == extents[NAMES[0]].offset
    store.before_write([NAMES[0]])
    store.before_write([NAMES[0]])
    assert sum(nbytes for _, nbytes in copied) == ELEMENTS * 4
    snapshot.part(NAMES[1], 50_000, 4)
    assert sum(nbytes for _, nbytes in copied) == ELEMENTS * 4 + 4 * 16_384
    store.release(snapshot)
    copied.clear()
    store.before_write(NAMES)
    assert not copied


def test_snapshots_are_of_their_steps_while_steps_go_on(store: StateStore) -> None:
    """Two readers read parts in any order while states are overwritten in another."""
    announced = threading.Semaphore(0)
    steps: list[int] = []
    failures: list[object] = []
    all_read = threading.Barrier(3)

    def announce(step: int) -> None:
        steps.append(step)
        announced.release(2)

    snapshots = Snapshots(store, announce)

    def update() -> None:
        draw = random.Random(1)
        for step in range(1, 61):
            for name in draw.sample(NAMES, len(NAMES)):
                if store.copies_on_write:
                    store.before_write([name])
                store.tensor(name).fill_(step)
            if step % 3 == 0:
                snapshots.take(step)

    def look(seed: int) -> None:
        draw = random.Random(seed)
        for round_ in range(20):
            announced.acquire()
            step = 3 * (round_ + 1)
            with snapshots.reading(step) as snapshot:
                for name in draw.sample(NAMES, len(NAMES)):
                    for offset in range(0, ELEMENTS * 4, 24_000):
                        found = read(snapshot, name, offset, 24_000)
                        if not bool((found == step).all()):
                            failures.append((step, name, offset, found.unique().tolist()))
            all_read.wait(SECONDS)
            all_read.wait(SECONDS)

    def release() -> None:
        for _ in range(20):
            all_read.wait(SECONDS)
            snapshots.release(steps[-1])
            all_read.wait(SECONDS)

    threads = [
        threading.Thread(target=work, args=arguments, daemon=True)
        for work, arguments in ((update, ()), (look, (2,)), (look, (3,)), (release, ()))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not failures
    assert steps == list(range(3, 61, 3))


def test_a_snapshot_that_is_read_by_somebody_lasts_until_he_has_done(store: StateStore) -> None:
    snapshots = Snapshots(store, lambda step: None)
    store.before_write(NAMES)
    snapshots.take(1)
    with snapshots.reading(1) as snapshot:
        snapshots.release(1)
        store.before_write(NAMES)
        for name in NAMES:
            store.tensor(name).fill_(9)
        assert (read(snapshot, NAMES[3], 0, ELEMENTS * 4) == 0).all()
    assert not store.copies_on_write
    snapshots.take(2)
    with snapshots.reading(2) as snapshot:
        assert (read(snapshot, NAMES[3], 0, ELEMENTS * 4) == 9).all()
    snapshots.reset()
