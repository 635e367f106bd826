"""Files of recovery points are copied to other members and come back: whole and checked, or not at all."""

import errno
import logging
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from link_pairs import raise_defect
from tokens_shown import token

from waferbox import deadlines
from waferbox.host.threads import CancellationToken
from waferbox.rpc.address import bind
from waferbox.rpc.server import make_channel, make_server
from waferbox.runtime.node_job import JobFailure
from waferbox.runtime.progress import Progress
from waferbox.security.tokens import Kind
from waferbox.states import point_copies, state_service
from waferbox.states.layout import StateRequirements
from waferbox.states.point_copies import PointCopies
from waferbox.states.point_folders import copy_folder, member_folder
from waferbox.states.point_shares import PointShares
from waferbox.states.state_memory import StateSettings
from waferbox.states.state_service import StateService
from waferbox.states.store import Snapshots, StateStore
from wsc.v1 import node_pb2, node_pb2_grpc, plan_pb2

JOB = "job-1"
ELEMENTS = 10_000
SECONDS = 30.0
ALL = 2**64 - 1
REQUIRED = StateRequirements(
    slots=[
        plan_pb2.StateSlot(
            value=number,
            name=f"s{number}",
            type=plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=[ELEMENTS]),
        )
        for number in range(1, 5)
    ]
)


def no_snapshot(step: int) -> None:
    raise AssertionError(f"a snapshot of step {step}, which no test makes")


class Member:
    """A shard as a process has it, with a disk of its own."""

    def __init__(self, number: int, root: Path) -> None:
        self.name = f"memoryx-{number}"
        self.root = root
        self.folder = member_folder(root, JOB, self.name)
        self.store = StateStore(StateSettings())
        self.kept: queue.Queue[node_pb2.RecoveryPointKept] = queue.Queue()
        self.copied: queue.Queue[node_pb2.RecoveryPointCopied] = queue.Queue()
        self.copies = PointCopies(lambda: root, JOB, self.name, self.copied.put, raise_defect, stays_in_memory=True)
        self.points = PointShares(
            self.store, lambda: self.folder, f"{self.name} of {JOB}", self.kept.put, raise_defect, self.copies.fetch
        )
        self.service = StateService()
        self.service.add_job(
            JOB, self.store, Snapshots(self.store, no_snapshot), lambda: False, self.copies.find, raise_defect
        )
        self.server = make_server()
        node_pb2_grpc.add_StateServiceServicer_to_server(self.service, self.server)
        self.address = bind(self.server, "127.0.0.1:0")
        self.server.start()
        self.points.load(REQUIRED, 0)
        self.write(0)

    def write(self, value: float) -> None:
        names = [slot.name for slot in REQUIRED.slots]
        self.store.before_write(names)
        for name in names:
            self.store.tensor(name).copy_(torch.arange(ELEMENTS) + value)
        self.store.mark_written(names)

    def first(self) -> list[float]:
        """The first element of each state."""
        return [float(self.store.tensor(slot.name)[0]) for slot in REQUIRED.slots]

    def keep(self, number: int) -> node_pb2.RecoveryPointKept:
        self.points.expect(node_pb2.Start(recovery_point=number))
        self.points.keep_first(Progress("update"))
        kept = self.kept.get(timeout=SECONDS)
        assert (kept.recovery_point, kept.given_up) == (number, False)
        return kept

    def copy(self, owner: "Member", number: int, same_as: int = 0) -> node_pb2.RecoveryPointCopied:
        """What comes of an order to copy another's file."""
        self.order(owner, number, same_as)
        copied = self.copied.get(timeout=SECONDS)
        assert (copied.member, copied.recovery_point) == (owner.name, number)
        return copied

    def order(self, owner: "Member", number: int, same_as: int = 0) -> None:
        self.copies.copy(
            node_pb2.CopyRecoveryPoint(
                member=owner.name, address=owner.address, recovery_point=number, same_as=same_as, nbytes=1000
            )
        )

    def copy_of(self, owner: "Member", number: int) -> Path:
        return copy_folder(self.root, JOB, owner.name) / str(number)

    def go_back(self, number: int, *others: "Member") -> None:
        self.copies.expect_loss([other.address for other in others], CancellationToken())
        assert self.points.load(REQUIRED, number) == []

    def die(self) -> None:
        """Nobody says a word."""
        self.server.stop(None).wait(SECONDS)

    def close(self) -> None:
        self.die()
        self.points.close()
        self.copies.close()
        self.store.close()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[Member]]:
    members = [Member(number, tmp_path / f"disk{number}") for number in range(3)]
    yield members
    for member in members:
        member.close()


@pytest.fixture
def pair(members: list[Member]) -> tuple[Member, Member]:
    """Whose point it is, and who keeps the copy."""
    return members[0], members[1]


def damaging(monkeypatch: pytest.MonkeyPatch, change: dict[int, bytes], cut: int = ALL) -> None:
    """Parts of files are small, and some bytes of them change on the way, or those behind a place are lost."""
    monkeypatch.setattr(point_copies, "PART_BYTES", 5_000)

    def parts_of(path: Path) -> Iterator[node_pb2.RecoveryPointPart]:
        for number, part in enumerate(point_copies.parts_of(path)):
            if number >= cut:
                return
            part.content = change.get(number, part.content)
            yield part

    monkeypatch.setattr(state_service, "parts_of", parts_of)


class Gate:
    """Holds whoever gives a file, behind its first part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        monkeypatch.setattr(point_copies, "PART_BYTES", 5_000)

        def parts_of(path: Path) -> Iterator[node_pb2.RecoveryPointPart]:
            for part in point_copies.parts_of(path):
                yield part
                self.reached.set()
                self.opened.wait(SECONDS)

        monkeypatch.setattr(state_service, "parts_of", parts_of)


def left(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_a_lost_point_comes_back_from_its_copy(members: list[Member], tmp_path: Path) -> None:
    owner, copier, other = members
    kept = owner.keep(7)
    copied = copier.copy(owner, 7)
    assert not copied.given_up
    assert copied.nbytes == copier.copy_of(owner, 7).stat().st_size > kept.nbytes
    assert copier.copy_of(owner, 7).read_bytes() == (owner.folder / "7").read_bytes()
    owner.die()
    replacement = Member(0, tmp_path / "new")
    replacement.write(5)
    replacement.go_back(7, owner, other, copier)  # one is gone, one has none
    assert replacement.first() == [0.0] * 4
    assert left(replacement.root) == [JOB, f"{JOB}/memoryx-0", f"{JOB}/memoryx-0/7"]
    replacement.go_back(7)  # it is its own now
    replacement.close()


def test_those_who_share_a_folder_say_so(members: list[Member], tmp_path: Path) -> None:
    """No copy is to be made then."""
    neighbour = Member(3, members[0].root)
    folders = [member.keep(7).folder for member in (*members, neighbour)]
    neighbour.go_back(7)
    assert neighbour.points.loaded_point().folder == folders[3] == folders[0]
    assert len({*folders}) == 3
    neighbour.close()


def test_a_damaged_point_comes_back_from_its_copy(pair: tuple[Member, Member]) -> None:
    owner, copier = pair
    owner.keep(7)
    assert not copier.copy(owner, 7).given_up
    path = owner.folder / "7"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    owner.write(3)
    owner.go_back(7, copier)
    assert owner.first() == [0.0] * 4
    assert path.read_bytes() == copier.copy_of(owner, 7).read_bytes()


def test_what_nobody_has_is_refused_with_its_name(pair: tuple[Member, Member]) -> None:
    owner, other = pair
    other.keep(7)
    with pytest.raises(JobFailure, match=f"recovery point 7 cannot be read: .*{owner.folder}/7") as raised:
        owner.go_back(7, other)
    assert raised.value.kind == node_pb2.Failure.KIND_USER, "all have answered: it does not heal"


def test_a_member_that_does_not_answer_may_have_a_copy_later(pair: tuple[Member, Member]) -> None:
    owner, copier = pair
    copier.service.remove_job(JOB)
    for address in ("127.0.0.1:1", copier.address):  # nobody, and one that has left the job
        owner.copies.expect_loss([address], CancellationToken())
        with pytest.raises(JobFailure, match=f"recovery point 7 cannot be read: {address} does not give") as raised:
            owner.points.load(REQUIRED, 7)
        assert raised.value.kind == node_pb2.Failure.KIND_NODE


def test_a_copy_of_a_damaged_file_is_not_kept(pair: tuple[Member, Member], caplog: pytest.LogCaptureFixture) -> None:
    owner, copier = pair
    owner.keep(7)
    content = bytearray((owner.folder / "7").read_bytes())
    content[5000] ^= 1
    (owner.folder / "7").write_bytes(content)
    assert copier.copy(owner, 7).given_up
    assert "is damaged" in caplog.text
    assert os.listdir(copier.copy_of(owner, 7).parent) == []


@pytest.mark.parametrize(
    ("change", "cut"),
    [({2: b"x" * 5_000}, ALL), ({2: b""}, ALL), ({2: b"x" * 200_000}, ALL), ({}, 3), ({}, 0)],
    ids=["other bytes", "fewer", "more", "cut", "nothing"],
)
def test_what_changes_on_the_way_is_not_kept(
    pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch, change: dict[int, bytes], cut: int
) -> None:
    owner, copier = pair
    owner.keep(7)
    damaging(monkeypatch, change, cut)
    assert copier.copy(owner, 7).given_up
    assert os.listdir(copier.copy_of(owner, 7).parent) == []
    (owner.folder / "7").rename(copier.copy_of(owner, 7))
    with pytest.raises(JobFailure, match="recovery point 7 cannot be read"):
        owner.go_back(7, copier)
    assert os.listdir(owner.folder) == []


def test_what_was_asked_for_is_what_must_come(members: list[Member]) -> None:
    """Another member's file in the place of the copy."""
    owner, copier, other = members
    other.keep(7)
    path = copier.copy_of(owner, 7)
    path.parent.mkdir(parents=True)
    path.write_bytes((other.folder / "7").read_bytes())
    with pytest.raises(JobFailure, match="recovery point 7 cannot be read"):
        owner.go_back(7, copier)


def test_a_disk_without_room_costs_the_copy_and_is_told_once(
    pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps room for the member's own points."""
    caplog.set_level(logging.WARNING)
    owner, copier = pair
    nbytes = owner.keep(7).nbytes
    owner.write(1)
    owner.keep(8)
    with monkeypatch.context() as patch:
        blocks = 2 * nbytes // 4096
        patch.setattr("os.fstatvfs", lambda _: os.statvfs_result((4096, 4096, 100, 2, blocks, 10, 10, 10, 0, 255)))
        assert copier.copy(owner, 7).given_up
        assert copier.copy(owner, 8).given_up
    advice = [record.getMessage() for record in caplog.records if record.name == "advice.recovery-copy"]
    assert len(advice) == 1
    for word in ("memoryx-0", str(copier.root), os.strerror(errno.ENOSPC), "WAFERBOX_RECOVERY_DIR"):
        assert word in advice[0]
    assert os.listdir(copier.copy_of(owner, 7).parent) == []
    assert not copier.copy(owner, 8).given_up


def test_the_same_file_is_not_sent_again(pair: tuple[Member, Member]) -> None:
    owner, copier = pair
    owner.keep(7)
    copier.copy(owner, 7)
    kept = owner.keep(8)
    assert kept.same_as == 7
    assert not copier.copy(owner, 8, same_as=7).given_up
    assert copier.copy_of(owner, 8).samefile(copier.copy_of(owner, 7))
    owner.keep(9)
    assert not copier.copy(owner, 9, same_as=6).given_up  # of which there is no copy
    assert not copier.copy_of(owner, 9).samefile(copier.copy_of(owner, 7))


def test_copies_go_with_what_they_are_copies_of(pair: tuple[Member, Member], tmp_path: Path) -> None:
    """Those of a process that was there before, too."""
    owner, copier = pair
    for number in (7, 8):
        owner.write(number)
        owner.keep(number)
        copier.copy(owner, number)
    successor = Member(1, copier.root)
    successor.copies.drop(8)
    assert os.listdir(copier.copy_of(owner, 8).parent) == ["8"]
    successor.keep(9)
    successor.copies.drop(ALL)
    successor.points.drop(ALL)
    successor.close()
    assert left(copier.root) == []


@pytest.mark.parametrize("end", ["drop", "close"])
def test_a_copy_that_nobody_wants_any_more_is_given_up(
    pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    owner, copier = pair
    owner.keep(7)
    gate = Gate(monkeypatch)
    copier.order(owner, 7)
    copier.order(owner, 7)
    assert gate.reached.wait(SECONDS)
    if end == "drop":
        copier.copies.drop(8)
        assert [copier.copied.get(timeout=SECONDS).given_up for _ in range(2)] == [True, True]
    copier.copies.close()
    gate.opened.set()
    if end == "drop":
        assert left(copier.root) == []
    else:
        assert os.listdir(copier.copy_of(owner, 7).parent) == []


def test_a_source_that_hangs_is_not_waited_for(pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, copier = pair
    owner.keep(7)
    gate = Gate(monkeypatch)
    monkeypatch.setattr(deadlines, "RECOVERY", replace(deadlines.RECOVERY, copy=0.5))
    assert copier.copy(owner, 7).given_up
    gate.opened.set()
    assert os.listdir(copier.copy_of(owner, 7).parent) == []


def test_who_waits_for_a_lost_point_can_be_interrupted(
    pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, copier = pair
    owner.keep(7)
    copier.copy(owner, 7)
    (owner.folder / "7").unlink()
    gate = Gate(monkeypatch)
    cancellation = CancellationToken()
    owner.copies.expect_loss([copier.address], cancellation)
    refused = threading.Event()

    def load() -> None:
        with pytest.raises(JobFailure, match="recovery point 7 cannot be read"):
            owner.points.load(REQUIRED, 7)
        refused.set()

    loading = threading.Thread(target=load)
    loading.start()
    assert gate.reached.wait(SECONDS)
    cancellation.cancel()
    assert refused.wait(SECONDS)
    loading.join()
    gate.opened.set()
    assert os.listdir(owner.folder) == []


@pytest.mark.parametrize(
    ("kind", "names", "expected"),
    [
        (Kind.MEMBER, (JOB, "memoryx-1"), "OK"),
        (Kind.MEMBER, ("job-2", "memoryx-1"), "PERMISSION_DENIED"),
        (Kind.JOB, (JOB,), "PERMISSION_DENIED"),
        (Kind.NODE, (), "PERMISSION_DENIED"),
    ],
)
def test_files_are_for_members_of_the_job_alone(
    pair: tuple[Member, Member], kind: Kind, names: tuple[str, ...], expected: str
) -> None:
    owner, _ = pair
    owner.keep(7)
    request = node_pb2.ReadRecoveryPointRequest(job=JOB, member=owner.name, recovery_point=7)
    with make_channel(owner.address, token(kind, *names)) as channel:
        call = node_pb2_grpc.StateServiceStub(channel).ReadRecoveryPoint(request, timeout=SECONDS)
        if expected == "OK":
            assert b"".join(part.content for part in call) == (owner.folder / "7").read_bytes()
        else:
            with pytest.raises(grpc.RpcError) as caught:
                next(iter(call))
            assert caught.value.code().name == expected


@pytest.mark.parametrize("member", ["", "..", "../memoryx-0", "/etc", "memoryx-0\0", "a" * 200, "memoryx-9"])
def test_nothing_else_is_given_away(pair: tuple[Member, Member], member: str) -> None:
    owner, _ = pair
    owner.keep(7)
    request = node_pb2.ReadRecoveryPointRequest(job=JOB, member=member, recovery_point=7)
    with make_channel(owner.address, token(Kind.MEMBER, JOB, "memoryx-1")) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            next(iter(node_pb2_grpc.StateServiceStub(channel).ReadRecoveryPoint(request, timeout=SECONDS)))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
