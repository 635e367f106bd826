"""Recovery points are of their steps, however steps, snapshots and the thread that writes interleave."""

import errno
import logging
import os
import queue
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from recovery_cases import recovery_points_of

from waferbox.links.hub import Stopped
from waferbox.runtime.node_job import JobFailure
from waferbox.runtime.progress import Progress
from waferbox.states import state_memory
from waferbox.states.layout import StateRequirements
from waferbox.states.point_file import PARTIAL, PointWriter
from waferbox.states.point_shares import PointShares
from waferbox.states.state_memory import StateSettings
from waferbox.states.store import Snapshots, StateStore
from wsc.v1 import node_pb2, plan_pb2

NAMES = [f"s{number}" for number in range(6)]
ELEMENTS = 30_000
SECONDS = 30.0


def required_of(shapes: dict[str, int]) -> StateRequirements:
    return StateRequirements(
        slots=[
            plan_pb2.StateSlot(
                value=number,
                name=name,
                type=plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_INT32, shape=[size]),
            )
            for number, (name, size) in enumerate(shapes.items(), 1)
        ]
    )


REQUIRED = required_of(dict.fromkeys(NAMES, ELEMENTS))


class Member:
    """A process that keeps states, its points and what it tells of them."""

    def __init__(self, folder: Path, settings: StateSettings) -> None:
        self.store = StateStore(settings)
        self.kept: queue.Queue[node_pb2.RecoveryPointKept] = queue.Queue()
        self.points: PointShares = recovery_points_of(self.store, folder, self.kept.put)
        self.progress = Progress("update")

    def write(self, value: int, names: list[str] = NAMES) -> None:
        """As a step does, or the client."""
        for name in names:
            if self.store.copies_on_write:
                self.store.before_write([name])
            self.store.tensor(name).fill_(value)
        self.store.mark_written(names)

    def keep_first(self, number: int) -> None:
        self.points.expect(node_pb2.Start(recovery_point=number))
        self.points.keep_first(self.progress)

    def keep_last(self, number: int) -> None:
        self.points.expect(node_pb2.Start(last_recovery_point=number))
        self.points.keep_last(self.progress)

    def keep_after(self, step: int, number: int) -> None:
        self.points.expect_after(step, number)
        assert self.points.due_step == step
        self.points.keep_due(step)
        assert self.points.due_step == 0

    def expect_kept(self, *numbers: int) -> None:
        told = [self.kept.get(timeout=SECONDS) for _ in numbers]
        assert [(kept.recovery_point, kept.given_up) for kept in told] == [(number, False) for number in numbers]

    def expect_given_up(self, *numbers: int) -> None:
        told = [self.kept.get(timeout=SECONDS) for _ in numbers]
        assert [(kept.recovery_point, kept.given_up) for kept in told] == [(number, True) for number in numbers]

    def settle(self) -> None:
        """Wait until all is done that the thread has to do."""
        done = threading.Event()
        self.points._do(done.set)
        assert done.wait(SECONDS)

    def values(self) -> dict[str, list[int]]:
        """The different elements of each state."""
        return {name: self.store.tensor(name).unique().tolist() for name in NAMES}

    def close(self) -> None:
        self.points.close()
        self.store.close()


class Writing:
    """Makes those wait that write to the files of points."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        write = PointWriter.write

        def wait_and_write(file: PointWriter, name: str, offset: int, content: memoryview) -> None:
            self.begun.release()
            assert self.go_on.wait(SECONDS)
            write(file, name, offset, content)

        monkeypatch.setattr(PointWriter, "write", wait_and_write)

    def wait(self) -> None:
        assert self.begun.acquire(timeout=SECONDS)


@pytest.fixture(params=["in memory", "in files"])
def settings(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateSettings:
    """What is copied is small beside a state."""
    monkeypatch.setattr("waferbox.states.store.CHUNK_BYTES", 16_384)
    monkeypatch.setattr("waferbox.states.point_share.CHUNK_BYTES", 16_384)
    monkeypatch.setattr("waferbox.states.point_share.PIECE_BYTES", 4_096)
    monkeypatch.setattr(state_memory, "CHUNK_BYTES", 16_384)
    return StateSettings(folder=tmp_path if request.param == "in files" else None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "recovery" / "job-1" / "memoryx-0"


@pytest.fixture
def member(settings: StateSettings, folder: Path) -> Iterator[Member]:
    """All of its states are 0."""
    member = Member(folder, settings)
    member.points.load(REQUIRED, 0)
    member.write(0)
    yield member
    member.close()


def put_back(folder: Path, number: int, required: StateRequirements = REQUIRED) -> dict[str, list[int]]:
    """What a process finds that has just come."""
    other = Member(folder, StateSettings())
    try:
        assert other.points.load(required, number) == []
        return other.values()
    finally:
        other.close()


def all_are(value: int) -> dict[str, list[int]]:
    return {name: [value] for name in NAMES}


def test_points_are_of_their_steps_while_steps_go_on_and_a_client_reads(member: Member, folder: Path) -> None:
    """Three kinds of copies of the same states at once."""
    points, store = member.points, member.store
    taken = threading.Semaphore(0)
    snapshots = Snapshots(store, lambda step: taken.release())
    failures: list[object] = []

    def update() -> None:
        draw = random.Random(1)
        points.expect(node_pb2.Start(recovery_point=100, last_recovery_point=400))
        points.keep_first(member.progress)
        for step in range(1, 61):
            for name in draw.sample(NAMES, len(NAMES)):
                for part in range(3):
                    if store.copies_on_write:
                        store.before_write([name], (part, 3))
                    store.tensor(name)[part * ELEMENTS // 3 : (part + 1) * ELEMENTS // 3].fill_(step)
            if points.due_step == step:
                points.keep_due(step)
            if step % 4 == 0:
                snapshots.take(step)
            if step % 10 == 0:
                member.points.expect_after(step + draw.randrange(1, 5), 300 + step)
        points.keep_last(member.progress)

    def look() -> None:
        for step in range(4, 61, 4):
            assert taken.acquire(timeout=SECONDS)
            with snapshots.reading(step) as snapshot:
                for name in NAMES:
                    part = snapshot.part(name, 0, ELEMENTS * 4)
                    found = part.memory.tensor(torch.int32, (ELEMENTS,), part.offset)
                    if not bool((found == step).all()):
                        failures.append((step, name, found.unique().tolist()))
            snapshots.release(step)

    threads = [threading.Thread(target=work, daemon=True) for work in (update, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not failures
    numbers: list[int] = []
    while not numbers or numbers[-1] != 400:
        numbers.append(member.kept.get(timeout=SECONDS).recovery_point)
    assert numbers[0] == 100
    assert put_back(folder, 100) == all_are(0)
    assert put_back(folder, 400) == all_are(60)
    for number in numbers[1:-1]:
        ((step,),) = {tuple(values) for values in put_back(folder, number).values()}
        assert number - 299 <= step <= number - 295, "the point was asked for, to be kept some steps later"
    snapshots.reset()


def test_what_was_copied_aside_is_given_back_as_soon_as_it_is_written(
    member: Member, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[state_memory.StateMemory] = []
    discard = state_memory.StateMemory.discard

    def spy(memory: state_memory.StateMemory, extent: tuple[int, int]) -> None:
        discard(memory, extent)
        if memory not in made:
            made.append(memory)
        taken.append(os.fstat(memory.memory.fileno()).st_blocks * 512)

    taken: list[int] = []
    monkeypatch.setattr(state_memory.StateMemory, "discard", spy)
    monkeypatch.setattr("waferbox.states.point_share.TRANSFER_BYTES", 65_536)
    writing = Writing(monkeypatch)
    member.keep_first(1)
    writing.wait()
    if member.store.settings.folder is None:
        member.write(1)
        writing.go_on.set()
    else:  # no more of it is in memory than a few pieces: who writes waits for the disk
        thread = threading.Thread(target=member.write, args=(1,))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        writing.go_on.set()
        thread.join(SECONDS)
    member.expect_kept(1)
    assert len(made) == 1
    assert made[0].memory.closed
    largest = ELEMENTS * 4 * len(NAMES) if member.store.settings.folder is None else 65_536 + 16_384
    assert max(taken) <= largest + 4096 * len(taken)
    assert taken[-1] <= 4096 * len(taken) + 4096
    assert put_back(folder, 1) == all_are(0)
    assert member.values() == all_are(1)


def test_nothing_is_copied_while_no_point_is_kept(member: Member) -> None:
    assert not member.store.copies_on_write
    member.keep_first(1)
    member.expect_kept(1)
    assert member.store.copies_on_write  # until somebody writes, which is noticed once
    member.write(5)
    assert not member.store.copies_on_write


def test_a_kernel_that_changes_no_state_does_not_hide_those_that_do(member: Member, folder: Path) -> None:
    """The last point of one execution is not taken for that of the next."""
    member.keep_last(1)
    member.expect_kept(1)
    member.settle()
    member.store.before_write([])
    member.write(5)
    member.keep_last(2)
    member.expect_kept(2)
    assert put_back(folder, 1) == all_are(0)
    assert put_back(folder, 2) == all_are(5)


def test_a_new_point_takes_the_place_of_one_that_is_not_complete(
    member: Member, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = Writing(monkeypatch)
    member.keep_after(1, 10)
    writing.wait()
    member.write(1)
    member.keep_after(2, 11)
    member.write(2)
    writing.go_on.set()
    member.expect_kept(11)
    assert os.listdir(folder) == ["11"]
    assert put_back(folder, 11) == all_are(1)


def test_the_first_and_the_last_point_are_completed(
    member: Member, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One between them is left out while the first is not complete; the last waits for that."""
    writing = Writing(monkeypatch)
    member.keep_first(10)
    writing.wait()
    member.write(1)
    member.keep_after(1, 11)
    member.write(2)
    thread = threading.Thread(target=member.keep_last, args=(12,))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert member.progress.waits
    writing.go_on.set()
    thread.join(SECONDS)
    assert not member.progress.waits
    member.expect_kept(10, 12)
    assert sorted(os.listdir(folder)) == ["10", "12"]
    assert put_back(folder, 10) == all_are(0)
    assert put_back(folder, 12) == all_are(2)


def test_who_waits_for_a_point_can_be_interrupted(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing(monkeypatch)
    member.keep_first(10)
    writing.wait()
    member.write(1)
    stopped = threading.Event()

    def keep() -> None:
        with pytest.raises(Stopped):
            member.keep_last(12)
        stopped.set()

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join(0.1)
    member.points.interrupt()
    assert stopped.wait(SECONDS)
    thread.join()
    writing.go_on.set()
    member.expect_kept(10)
    member.points.load(REQUIRED, 0)
    member.keep_last(13)
    member.expect_kept(13)


def test_the_same_states_are_not_written_again(member: Member, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an evaluation, while the point before may not be complete yet."""
    writing = Writing(monkeypatch)
    member.keep_last(1)
    member.keep_first(2)
    writing.go_on.set()
    member.expect_kept(1, 2)
    member.points.drop(2)
    member.points.load(REQUIRED, 0)
    member.keep_last(3)
    member.expect_kept(3)
    assert (folder / "2").samefile(folder / "3")
    assert not (folder / "1").exists()
    member.points.drop(4)
    member.keep_first(4)  # nothing is left to be linked
    member.expect_kept(4)
    assert os.listdir(folder) == ["4"]
    assert put_back(folder, 4) == all_are(0)
    member.write(7)
    member.keep_last(5)
    member.expect_kept(5)
    assert put_back(folder, 5) == all_are(7)


def test_a_point_is_completed_though_states_move(member: Member, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next execution may lay them out anew."""
    writing = Writing(monkeypatch)
    member.keep_last(1)
    writing.wait()
    before = member.store.states
    assert member.points.load(required_of({"other": 5, **dict.fromkeys(NAMES, ELEMENTS)}), 0) == ["other"]
    assert member.store.states is not before
    member.write(3)
    writing.go_on.set()
    member.expect_kept(1)
    assert put_back(folder, 1) == all_are(0)
    assert member.values() == all_are(3)


@pytest.mark.parametrize("same_layout", [True, False])
def test_a_survivor_goes_back_to_a_point(member: Member, same_layout: bool) -> None:
    member.keep_first(1)
    member.expect_kept(1)
    member.write(4)
    member.keep_after(4, 2)  # given up: the job goes back beyond it
    required = REQUIRED if same_layout else required_of({NAMES[2]: ELEMENTS, "other": 3, NAMES[0]: ELEMENTS})
    if same_layout:
        before = member.store.states
        assert member.points.load(required, 1) == []
        assert member.store.states is before
    else:
        assert member.points.load(required, 1) == ["other"]
    assert member.values() == all_are(0)
    assert all(member.store.is_written(name) for name in NAMES)
    member.write(5)
    member.keep_last(3)
    while member.kept.get(timeout=SECONDS).recovery_point != 3:
        pass


def test_what_was_put_back_is_a_point_already(member: Member, folder: Path) -> None:
    member.keep_first(1)
    member.expect_kept(1)
    member.write(4)
    member.points.load(REQUIRED, 1)
    member.keep_first(2)
    member.expect_kept(2)
    assert (folder / "1").samefile(folder / "2")
    member.write(5)
    member.keep_last(3)
    member.expect_kept(3)
    assert put_back(folder, 3) == all_are(5)


def test_what_a_point_has_not_is_missing(folder: Path, settings: StateSettings) -> None:
    """And what it has of another type is not taken."""
    first = Member(folder, settings)
    first.points.load(required_of({"a": 5, "b": 7, "c": 3}), 0)
    first.write(1, ["a", "b"])
    first.keep_first(1)
    first.expect_kept(1)
    first.write(2, ["a", "b", "c"])
    assert first.points.load(required_of({"a": 5, "b": 8, "c": 3}), 1) == ["b", "c"]
    assert first.store.tensor("a").tolist() == [1] * 5
    first.close()


def test_a_point_that_cannot_be_read_is_refused_with_its_name(member: Member, folder: Path) -> None:
    for number in (1, 2):
        member.write(number)
        member.keep_first(number)
        member.expect_kept(number)
    path = folder / "1"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(JobFailure, match=f"recovery point 1 cannot be read: {path} is damaged") as raised:
        member.points.load(REQUIRED, 1)
    assert raised.value.kind == node_pb2.Failure.KIND_USER, "it does not heal"
    assert "start the script again from its last checkpoint" in raised.value.message
    assert not all(member.store.is_written(name) for name in NAMES)
    with pytest.raises(JobFailure, match=f"recovery point 3 cannot be read: .*'{folder}/3'") as raised:
        member.points.load(REQUIRED, 3)
    assert raised.value.kind == node_pb2.Failure.KIND_USER
    os.truncate(path, len(content) // 2)
    with pytest.raises(JobFailure, match=f"recovery point 1 cannot be read: {path} is damaged: it is not") as raised:
        member.points.load(REQUIRED, 1)
    assert raised.value.kind == node_pb2.Failure.KIND_USER
    assert member.points.load(REQUIRED, 2) == []
    assert member.values() == all_are(2)


def test_the_job_goes_on_without_points_where_the_disk_is_full(
    member: Member, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once; as soon as there is room again, there are points."""
    caplog.set_level(logging.WARNING)
    write = os.pwrite
    room = 50_000
    left = [room]

    def fill(descriptor: int, content: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(PARTIAL):
            left[0] -= len(content)
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content, offset)

    with monkeypatch.context() as patch:
        patch.setattr("waferbox.states.point_file.os.pwrite", fill)
        member.keep_first(1)
        member.write(1)
        member.keep_last(2)
        member.write(2)
        member.points.drop(1)
        member.settle()
    assert left[0] < room
    advice = [record for record in caplog.records if record.name == "advice.recovery"]
    assert len(advice) == 1
    for word in (str(folder), "No space left", "0.72 MB are needed", "WAFERBOX_RECOVERY_DIR"):
        assert word in advice[0].getMessage()
    assert not folder.exists()
    member.expect_given_up(1, 2)
    member.keep_last(3)
    member.expect_kept(3)
    assert put_back(folder, 3) == all_are(2)


def test_a_point_that_nobody_can_write_holds_nothing(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps do not copy for ever, and the next point does not wait for it."""

    def refuse(*arguments: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, "nobody may")

    with monkeypatch.context() as patch:
        patch.setattr("waferbox.states.point_shares.PointWriter", refuse)
        member.keep_first(1)
        member.write(1)
        member.keep_last(2)
        member.write(2)
        member.keep_first(3)
        member.write(3)
        member.settle()
    member.expect_given_up(1, 2, 3)
    member.keep_last(4)
    member.expect_kept(4)


def test_points_of_the_same_states_are_given_up_with_one_that_cannot_be_written(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def fail(*_: object) -> None:
        assert go_on.wait(SECONDS)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PointWriter, "write", fail)
    member.keep_first(1)
    member.keep_last(2)
    go_on.set()
    member.expect_given_up(1, 2)


def test_what_a_dead_process_has_left_unfinished_goes(member: Member, folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    (folder / "7.0123abcd.partial").write_bytes(b"half")
    member.keep_first(8)
    member.expect_kept(8)
    assert os.listdir(folder) == ["8"]


def test_what_is_not_complete_goes_with_the_job(
    settings: StateSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Member(folder, settings)
    member.points.load(REQUIRED, 0)
    member.write(0)
    member.keep_first(1)
    member.expect_kept(1)
    writing = Writing(monkeypatch)
    member.write(1)
    member.keep_last(2)
    writing.wait()
    threading.Timer(0.1, writing.go_on.set).start()
    member.close()
    assert os.listdir(folder) == ["1"]
    again = Member(folder, settings)
    again.points.drop(2**64 - 1)
    again.close()
    assert not folder.parent.exists()
