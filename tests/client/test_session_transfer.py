"""State on its way between the client and a real shard's StateService, over both lanes."""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
import torch
from link_pairs import raise_defect
from tokens_shown import token

from cstorch._internal.session import failures, transfer
from cstorch._internal.session.transfer import BATCH_BYTES, Outgoing, ShardConnection, batches
from cstorch.errors import ClusterError, ConfigurationError, CstorchError, InternalError, NodeLostError
from waferbox import deadlines
from waferbox.links.dialling import dial
from waferbox.links.listener import LinkListener, PendingLink
from waferbox.rpc.server import make_channel, make_server
from waferbox.security.tokens import Kind
from waferbox.states import state_service
from waferbox.states.layout import StateRequirements
from waferbox.states.state_memory import StateSettings
from waferbox.states.state_service import StateService
from waferbox.states.store import Snapshots, StateStore
from wsc.v1 import coordinator_pb2, initialisation_pb2, node_pb2, node_pb2_grpc, plan_pb2

FLOAT, INT, BOOL = (plan_pb2.ELEMENT_TYPE_FLOAT32, plan_pb2.ELEMENT_TYPE_INT64, plan_pb2.ELEMENT_TYPE_BOOL)
pytestmark = pytest.mark.services

VALUES = {
    "large": torch.arange(300_000, dtype=torch.float32).reshape(300, 1000),
    "small": torch.tensor([1.5, -2.0]),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "flags": torch.tensor([True, False, True]),
}
TYPES = {torch.float32: FLOAT, torch.int64: INT, torch.bool: BOOL}


def no_point(member: str, number: int) -> Path:
    raise FileNotFoundError


class Job:
    """One that goes on, or has failed."""

    def __init__(self, failure: CstorchError | None = None) -> None:
        self.failure = failure
        self.where: coordinator_pb2.StateShard | None = None  # the shard
        self.token = token(Kind.JOB, "job")

    def locate(self, shard: int, step: int) -> coordinator_pb2.StateShard:
        if self.failure is not None:
            raise self.failure
        assert self.where is not None
        return self.where

    def reason(self, error: Exception, doing: str) -> CstorchError:
        return self.failure or failures.from_error(error, doing)


class Shard:
    def __init__(self, folder: Path | None) -> None:
        self.running = False
        self.store = StateStore(StateSettings(folder=folder))
        states = [
            plan_pb2.StateSlot(
                value=number, name=name, type=plan_pb2.TensorType(element_type=TYPES[value.dtype], shape=value.shape)
            )
            for number, (name, value) in enumerate(VALUES.items(), start=1)
        ]
        self.store.load(StateRequirements(slots=states))
        self.snapshots = Snapshots(self.store, lambda step: None)
        self.service = StateService()
        self.server = make_server()
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.listener = LinkListener(self.address, raise_defect)
        self.listener.add_to_server(self.server)
        self.service.listen_with(self.listener)
        node_pb2_grpc.add_StateServiceServicer_to_server(self.service, self.server)
        self.service.add_job("job", self.store, self.snapshots, lambda: self.running, no_point, raise_defect)
        self.server.start()

    def cut_links(self) -> None:
        for session in self.service._jobs["job"].sessions._sessions.values():
            session.close()

    def close(self) -> None:
        self.service.remove_job("job")
        self.server.stop(None).wait(5)
        self.listener.close()
        self.store.close()


@pytest.fixture(params=["in memory", "in files"])
def shard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shard]:
    shard = Shard(tmp_path if request.param == "in files" else None)
    yield shard
    shard.close()


@pytest.fixture(params=["shared_memory", "grpc"])
def connection(request: pytest.FixtureRequest, shard: Shard) -> Iterator[ShardConnection]:
    where = coordinator_pb2.StateShard(shard=0, address=shard.address, job="job")
    job = Job()
    job.where = where
    connection = ShardConnection(where, request.param, job)
    yield connection
    connection.close()


def outgoing(name: str) -> Outgoing:
    return Outgoing(name=name, nbytes=VALUES[name].nbytes, value=lambda: VALUES[name])


def read(connection: ShardConnection, name: str, step: int = 0) -> torch.Tensor:
    value = VALUES[name]
    return torch.cat(
        [piece.reshape(-1) for piece in connection.read(name, tuple(value.shape), value.dtype, step)]
    ).view(value.shape)


def filled(name: str, value: float) -> node_pb2.InitialState:
    """A state that has one number in every place when its program was run."""
    program = initialisation_pb2.InitialProgram()
    program.buffers.add(element_type=FLOAT, elements=VALUES[name].numel())
    call = program.calls.add(operation="aten.fill_.Scalar")
    call.arguments.add(view=initialisation_pb2.BufferView(shape=[VALUES[name].numel()], stride=[1]))
    call.arguments.add(number=value)
    return node_pb2.InitialState(name=name, program=program)


def test_a_shard_that_has_lost_what_was_staged_gets_the_programs(shard: Shard, connection: ShardConnection) -> None:
    """As one that has taken the place of another, or that is asked a second time."""
    with make_channel(shard.address, Job().token) as channel:
        stub = node_pb2_grpc.StateServiceStub(channel)
        staged = [filled("large", 1), filled("small", 2)]
        stub.StageStates(node_pb2.StageStatesRequest(job="job", states=staged))
    names = [node_pb2.InitialState(name=state.name) for state in staged]
    connection.initialise(names, unstaged=pytest.fail)
    assert read(connection, "small").tolist() == [2, 2]
    connection.initialise(names, unstaged=lambda: [filled("large", 3), filled("small", 4)])
    assert read(connection, "small").tolist() == [4, 4]
    assert set(read(connection, "large").unique().tolist()) == {3}


def test_what_is_written_is_read(shard: Shard, connection: ShardConnection) -> None:
    connection.write([outgoing(name) for name in VALUES])
    for name, value in VALUES.items():
        assert torch.equal(read(connection, name), value), name
    connection.write([outgoing("small")])
    shard.snapshots.take(3)
    shard.store.before_write(["small"])
    shard.store.tensor("small").zero_()
    assert torch.equal(read(connection, "small", 3), VALUES["small"])
    assert torch.equal(read(connection, "small"), torch.zeros(2))


def test_large_states_are_written_in_parts(
    shard: Shard, connection: ShardConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard never has the bytes of a whole one beside it."""
    monkeypatch.setattr(transfer, "BATCH_BYTES", 500_000)
    found = []
    parts_of = state_service._parts

    def spy(request: node_pb2.TransferStateRequest, *arguments: Any) -> list[tuple[int, int]]:
        parts = parts_of(request, *arguments)
        found.extend(parts)
        assert not shard.store.is_written("small")
        assert not shard.store.is_written("large") or len(found) > 3
        return parts

    monkeypatch.setattr(state_service, "_parts", spy)
    connection.write([outgoing("large")])
    connection.write([outgoing("small")])
    monkeypatch.undo()
    assert found == [(0, 500_000), (500_000, 500_000), (1_000_000, 200_000), (0, 8)]
    assert torch.equal(read(connection, "large"), VALUES["large"])


def test_refusals_name_the_reason_and_the_connection_recovers(shard: Shard, connection: ShardConnection) -> None:
    with pytest.raises(ClusterError, match="no state small"):  # nobody has written it
        read(connection, "small")
    connection.write([outgoing("small")])
    shard.running = True
    with pytest.raises(ClusterError, match="while an execution runs"):
        read(connection, "small")
    shard.running = False
    with pytest.raises(ClusterError, match="no snapshot of step 9"):
        read(connection, "small", 9)
    assert torch.equal(read(connection, "small"), VALUES["small"])


def test_a_write_of_the_wrong_size_is_refused(connection: ShardConnection) -> None:
    wrong = Outgoing(name="small", nbytes=12, value=lambda: torch.zeros(3))
    with pytest.raises(ClusterError):
        connection.write([wrong])
    connection.write([outgoing("small")])


def test_a_shard_that_goes_away(shard: Shard, connection: ShardConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, connect=0.2))
    connection.write([outgoing("small")])
    shard.server.stop(None).wait(5)
    with pytest.raises(ClusterError):
        read(connection, "small")


def test_batches_are_small_unless_one_state_is_large() -> None:
    def state(nbytes: int) -> Outgoing:
        return Outgoing(name="x", nbytes=nbytes, value=lambda: torch.zeros(0))

    sizes = [10, BATCH_BYTES, 10, 20]
    assert [[one.nbytes for one in batch] for batch in batches([state(size) for size in sizes])] == [
        [10],
        [BATCH_BYTES],
        [10, 20],
    ]
    assert len(list(batches([state(1)] * 3000))) == 3


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, connect=0.2))
    job = Job()
    job.where = coordinator_pb2.StateShard(shard=2, address="127.0.0.1:1", job="job")
    connection = ShardConnection(job.where, "auto", job)
    with pytest.raises(ClusterError, match="no MemoryX shard 2 answers"):
        next(connection.read("x", (1,), torch.float32, 0))


def test_a_large_state_comes_in_pieces(connection: ShardConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    connection.write([outgoing("large")])
    monkeypatch.setattr(transfer, "BATCH_BYTES", 500_000)
    pieces = list(connection.read("large", (300, 1000), torch.float32, 0))
    assert [len(piece) for piece in pieces] == [125, 125, 50]
    assert torch.equal(torch.cat(pieces), VALUES["large"])
    with pytest.raises(ConfigurationError, match="does not lie within"):
        list(connection.read("large", (301, 1000), torch.float32, 0))


def test_a_connection_that_was_cut_is_opened_again_while_the_job_goes_on(
    shard: Shard, connection: ShardConnection
) -> None:
    """As after this process was suspended for longer than a peer is waited for."""
    connection.write([outgoing("small")])
    shard.cut_links()
    assert torch.equal(read(connection, "small"), VALUES["small"])


@pytest.mark.parametrize("end", ["dropped", "cut"])
def test_where_the_job_has_ended_its_end_is_told(shard: Shard, end: str) -> None:
    job = Job()
    connection = ShardConnection(coordinator_pb2.StateShard(shard=0, address=shard.address, job="job"), "auto", job)
    connection.write([outgoing("small")])
    job.failure = NodeLostError("wafer-1 died")
    if end == "dropped":
        shard.service.remove_job("job")
        shard.service.add_job("another", shard.store, shard.snapshots, lambda: False, no_point, raise_defect)
    else:
        shard.cut_links()
    with pytest.raises(NodeLostError, match="wafer-1 died"):
        read(connection, "small")
    connection.close()
    if end == "dropped":
        shard.service.remove_job("another")
        shard.service.add_job("job", shard.store, shard.snapshots, lambda: False, no_point, raise_defect)


def test_a_defect_in_the_state_service_ends_the_job(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Exception] = []
    shard.service._jobs["job"].on_defect = told.append

    def fail(names: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(shard.store, "mark_written", fail)
    connection = ShardConnection(coordinator_pb2.StateShard(shard=0, address=shard.address, job="job"), "auto", Job())
    with pytest.raises(InternalError, match="ZeroDivisionError: oh"):
        connection.write([outgoing("small")])
    assert [str(error) for error in told] == ["oh"]
    connection.close()


def open_session(shard: Shard) -> str:
    with make_channel(shard.address, Job().token) as channel:
        stub = node_pb2_grpc.StateServiceStub(channel)
        opened: node_pb2.OpenStateResponse = stub.OpenState(node_pb2.OpenStateRequest(job="job"), timeout=10)
        return opened.token


def test_sessions_that_are_not_used_make_room(shard: Shard, connection: ShardConnection) -> None:
    connection.write([outgoing("small")])
    unused = open_session(shard)
    for _ in range(state_service.MAX_SESSIONS - 2):
        open_session(shard)
        assert torch.equal(read(connection, "small"), VALUES["small"])
    sessions = shard.service._jobs["job"].sessions
    assert unused in sessions._sessions
    open_session(shard)
    assert len(sessions) == state_service.MAX_SESSIONS
    assert unused not in sessions._sessions
    assert len(shard.listener._pending) == state_service.MAX_SESSIONS - 1
    assert torch.equal(read(connection, "small"), VALUES["small"])


def test_a_session_that_is_opened_while_the_job_ends_is_not_left(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    expect = shard.listener.expect

    def expect_at_the_end(token: str, name: str) -> PendingLink:
        pending = expect(token, name)
        shard.service.remove_job("job")
        return pending

    monkeypatch.setattr(shard.listener, "expect", expect_at_the_end)
    with pytest.raises(grpc.RpcError, match="keeps no state of a job"):
        open_session(shard)
    assert not shard.listener._pending
    shard.service.add_job("job", shard.store, shard.snapshots, lambda: False, no_point, raise_defect)


def test_a_call_that_waits_while_the_job_ends_does_not_use_its_store(shard: Shard) -> None:
    states = shard.service._jobs["job"]
    request = node_pb2.InitialiseStatesRequest(job="job", states=[filled("small", 1)])
    with make_channel(shard.address, Job().token) as channel:
        with states.lock:
            call = node_pb2_grpc.StateServiceStub(channel).InitialiseStates.future(request, timeout=10)
            remover = threading.Thread(target=shard.service.remove_job, args=["job"])
            remover.start()
            while "job" in shard.service._jobs:
                time.sleep(0.01)
        remover.join()
        with pytest.raises(grpc.RpcError, match="keeps no state of a job"):
            call.result()
    shard.service.add_job("job", shard.store, shard.snapshots, lambda: False, no_point, raise_defect)
    assert not shard.store.is_written("small")


class _EndedCall:
    """The context of a call that has ended before it is served."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise RuntimeError(code)

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED


def test_a_transfer_that_was_given_up_before_it_began_does_not_wait(shard: Shard) -> None:
    request = node_pb2.TransferStateRequest(job="job", token=open_session(shard), names=["small"])
    link = dial(
        shard.listener.endpoint(),
        request.token,
        name="memoryx-0",
        own_name="client",
        lane=node_pb2.LANE_SHARED_MEMORY,
        deadline_seconds=10,
    )
    with closing(link), pytest.raises(RuntimeError, match="CANCELLED"):
        shard.service.WriteState(request, _EndedCall())  # type: ignore[arg-type]  # the service uses no more of it
    assert len(shard.service._jobs["job"].sessions) == 0


@pytest.mark.parametrize("names", [(), (Kind.JOB, "job-of-eve"), (Kind.USER, "eve"), (Kind.NODE,)])
def test_a_stranger_reads_and_writes_no_weights(shard: Shard, names: tuple[Any, ...]) -> None:
    """The name of a job was once enough."""
    with make_channel(shard.address, token(*names) if names else "") as channel:
        stub = node_pb2_grpc.StateServiceStub(channel)
        calls: list[Callable[..., object]] = [partial(stub.OpenState, node_pb2.OpenStateRequest(job="job"))]
        transfer_request = node_pb2.TransferStateRequest(job="job", names=["small"])
        calls.append(partial(stub.ReadState, transfer_request))
        calls.append(partial(stub.WriteState, transfer_request))
        calls.append(partial(stub.InitialiseStates, node_pb2.InitialiseStatesRequest(job="job")))
        calls.append(partial(stub.StageStates, node_pb2.StageStatesRequest(job="job")))
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call(timeout=10)
            assert caught.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def test_an_interrupted_transfer_ends_at_once(connection: ShardConnection) -> None:
    """At whatever place: within gRPC an interrupt would leave a call that its channel waits for without end."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    connection.write([outgoing("small")])
    chance = random.Random(0)
    reader = threading.get_ident()
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        for _ in range(300):
            timer = threading.Timer(chance.uniform(0.0, 0.004), signal.pthread_kill, (reader, signal.SIGUSR2))
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the timer interrupts what follows
                timer.start()
                while True:
                    read(connection, "small")
            assert time.monotonic() - began < 5.0
            timer.join()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert torch.equal(read(connection, "small"), VALUES["small"])
