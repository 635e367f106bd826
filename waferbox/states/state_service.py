"""StateService: transfers of states between a state keeper and the client.

OpenState returns a token for a link. Each transfer is one call, during which the tensors travel over this link as
bytes: one frame for each name, in order, whose group is the position in the names and whose step is the request's. A
state that a program can compute is computed here instead.
"""

import functools
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import grpc
import torch

from waferbox import deadlines
from waferbox.cirh import CirhError
from waferbox.cirh.execution import initialisation
from waferbox.links.hub import Hub, Stopped
from waferbox.links.link import Link, LinkLost
from waferbox.links.listener import LinkListener, PendingLink
from waferbox.links.shared_memory import Slice
from waferbox.states.layout import StateExtent
from waferbox.states.point_copies import parts_of
from waferbox.states.staging import NotStagedError, Staging, run_all
from waferbox.states.store import Snapshots, StateStore
from wsc.v1 import node_pb2, node_pb2_grpc

logger = logging.getLogger(__name__)

MAX_NAMES = 1 << 16  # the most states in one call
MAX_SESSIONS = 16  # the most of one job; a script has one or two at a time


class StateTransferSession:
    """The link of one connection of a script, over which its transfers go. Used by one transfer at a time."""

    def __init__(self, pending: PendingLink) -> None:
        self._pending = pending
        self._link: Link | None = None
        self.hub = Hub()

    def link(self) -> Link:
        """Returns the link, which the client opens before its first transfer."""
        if self._link is None:
            self._link = self._pending.wait(deadlines.STATE_TRANSFER.link)
            self.hub.add(self._link)
        return self._link

    def close(self) -> None:
        self.hub.close()
        if self._link is None:
            self._pending.close()
        else:
            self._link.close()


class StateTransferSessions:
    """The sessions of one job, at most MAX_SESSIONS. Thread-safe.

    A client does not say that it has given up a session, and so the one that was used least recently makes room.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, StateTransferSession] = {}  # by token; the least recently used one comes first
        self._in_transfer = ""  # the token of the session that has a transfer
        self._is_closed = False

    def add(self, token: str, session: StateTransferSession) -> bool:
        """Adds a session; closes it and returns False if the job has ended."""
        left: list[StateTransferSession] = []
        with self._lock:
            is_added = not self._is_closed
            if is_added:
                idle = [known for known in self._sessions if known != self._in_transfer]
                num_left = max(0, len(self._sessions) + 1 - MAX_SESSIONS)
                left = [self._sessions.pop(known) for known in idle[:num_left]]
                self._sessions[token] = session
        for other in left if is_added else [session]:
            other.close()
        return is_added

    def begin_transfer(self, token: str) -> StateTransferSession | None:
        """Returns the session of a token, which stays open until `end_transfer`; None if there is none."""
        with self._lock:
            session = self._sessions.pop(token, None)
            if session is not None:
                self._sessions[token] = session  # behind the others
                self._in_transfer = token
            return session

    def end_transfer(self, token: str, *, is_kept: bool) -> None:
        """Ends the use of a session, which is closed unless it is kept."""
        with self._lock:
            self._in_transfer = ""
            session = None if is_kept else self._sessions.pop(token)
        if session is not None:
            session.close()

    def stop(self) -> None:
        """Makes transfers raise Stopped, and refuses further sessions."""
        with self._lock:
            self._is_closed = True
            for session in self._sessions.values():
                session.hub.stop()

    def close(self) -> None:
        """Closes all sessions, after `stop` and the end of the last transfer."""
        with self._lock:
            for session in self._sessions.values():
                session.close()
            self._sessions.clear()

    def __len__(self) -> int:
        return len(self._sessions)


@dataclass(slots=True)
class JobStates:
    """The states of a job, and the calls to its node, as the service uses them. `lock` guards the states."""

    store: StateStore
    snapshots: Snapshots
    is_running: Callable[[], bool]
    find_point: Callable[[str, int], Path]
    on_defect: Callable[[Exception], None]
    staging: Staging
    lock: threading.Lock = field(default_factory=threading.Lock)  # held by a transfer, and while states are laid out
    sessions: StateTransferSessions = field(default_factory=StateTransferSessions)


class _JobRequest(Protocol):
    job: str


_Request = TypeVar("_Request", bound=_JobRequest)
_Response = TypeVar("_Response")


def _reports_defects(
    method: "Callable[[StateService, _Request, grpc.ServicerContext], _Response]",
) -> "Callable[[StateService, _Request, grpc.ServicerContext], _Response]":
    """Wraps a method of the service: an exception that is no answer to the caller ends the job, with its traceback."""

    @functools.wraps(method)
    def call(service: "StateService", request: _Request, context: grpc.ServicerContext) -> _Response:
        try:
            return method(service, request, context)
        except Exception as error:
            if context.code() is None:  # type: ignore[attr-defined]  # `abort` was not called
                logger.exception("Defect in %s", method.__name__)
                service.report_defect(request.job, error)
                context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            raise

    return call


class StateService(node_pb2_grpc.StateServiceServicer):
    """Serves the states of the jobs that this process works for. Thread-safe."""

    def __init__(self) -> None:
        self._listener: LinkListener | None = None
        self._jobs: dict[str, JobStates] = {}

    def listen_with(self, listener: LinkListener) -> None:
        """Sets the listener for the links of clients, before the server starts."""
        self._listener = listener

    def add_to(self, server: grpc.Server, listener: LinkListener) -> None:
        """Adds the service to a server, with the node's listener for the links of clients."""
        self.listen_with(listener)
        node_pb2_grpc.add_StateServiceServicer_to_server(self, server)

    def add_job(
        self,
        job: str,
        store: StateStore,
        snapshots: Snapshots,
        is_running: Callable[[], bool],
        find_point: Callable[[str, int], Path],
        on_defect: Callable[[Exception], None],
    ) -> None:
        """Serves the states of a job.

        Args:
            job: the name of the job.
            store: its live states.
            snapshots: its snapshots.
            is_running: returns whether steps change the live states, which can be neither read nor written then.
            find_point: returns the file of a member's recovery point; raises FileNotFoundError, ValueError.
            on_defect: called with an unexpected exception that has ended a call.
        """
        # Staged values are in memory, whatever the limit for states.
        staging = Staging(has_room=store.settings.limit_bytes is None)
        self._jobs[job] = JobStates(store, snapshots, is_running, find_point, on_defect, staging)

    def remove_job(self, job: str) -> None:
        """Ends the job's transfers and sessions. Its store can be closed after the call."""
        states = self._jobs.pop(job)
        states.staging.close()
        states.sessions.stop()
        with states.lock:
            states.sessions.close()

    def report_defect(self, job: str, error: Exception) -> None:
        """Reports an unexpected exception that has ended a call of the job."""
        states = self._jobs.get(job)
        if states is not None:
            states.on_defect(error)

    @contextmanager
    def alone(self, job: str) -> Iterator[None]:
        """Keeps transfers of the job out."""
        with self._jobs[job].lock:
            yield

    @_reports_defects
    def OpenState(
        self, request: node_pb2.OpenStateRequest, context: grpc.ServicerContext
    ) -> node_pb2.OpenStateResponse:
        states = self._states(request.job, context)
        assert self._listener is not None, "the node listens"
        token = secrets.token_hex(16)
        session = StateTransferSession(self._listener.expect(token, "client"))
        if not states.sessions.add(token, session):
            _abort_without_job(request.job, context)
        return node_pb2.OpenStateResponse(token=token, endpoint=self._listener.endpoint())

    @_reports_defects
    def WriteState(
        self, request: node_pb2.TransferStateRequest, context: grpc.ServicerContext
    ) -> node_pb2.TransferStateResponse:
        with self._transfer(request, context) as (states, session):
            _refuse_while_running(states, context)
            store = states.store
            extents = _extents(request.names, store.extents(), context)
            parts = _parts(request, extents, context)
            link = session.link()
            link.expect({group: nbytes for group, (_, nbytes) in enumerate(parts)})
            store.before_write(request.names)
            for group, (extent, (offset, nbytes)) in enumerate(zip(extents, parts, strict=True)):
                message = session.hub.receive(link, group, request.step)
                if message.nbytes != nbytes:
                    context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT,
                        f"{request.names[group]} has {nbytes} bytes, {message.nbytes} came",
                    )
                with store.states.passing((extent.offset + offset, nbytes)):
                    target = store.memory.tensor(torch.uint8, (nbytes,), extent.offset + offset)
                    target.copy_(message.tensor(torch.uint8, (nbytes,), 0))
                if offset + nbytes == extent.nbytes:
                    store.mark_written([request.names[group]])
        return node_pb2.TransferStateResponse(nbytes=sum(nbytes for _, nbytes in parts))

    @_reports_defects
    def ReadState(
        self, request: node_pb2.TransferStateRequest, context: grpc.ServicerContext
    ) -> node_pb2.TransferStateResponse:
        with self._transfer(request, context) as (states, session):
            if request.step:
                with ExitStack() as stack:
                    try:
                        snapshot = stack.enter_context(states.snapshots.reading(request.step))
                    except KeyError:
                        context.abort(grpc.StatusCode.NOT_FOUND, f"there is no snapshot of step {request.step}")
                    parts = _parts(request, _extents(request.names, snapshot.extents, context), context)
                    for group, (name, (offset, nbytes)) in enumerate(zip(request.names, parts, strict=True)):
                        payload = snapshot.part(name, offset, nbytes)
                        with snapshot.aside.passing((payload.offset, nbytes)):
                            _send(session, group, request.step, payload)
            else:
                _refuse_while_running(states, context)
                store = states.store
                written = {name: extent for name, extent in store.extents().items() if store.is_written(name)}
                extents = _extents(request.names, written, context)
                parts = _parts(request, extents, context)
                for group, (extent, (offset, nbytes)) in enumerate(zip(extents, parts, strict=True)):
                    payload = Slice(store.memory, extent.offset + offset, nbytes)
                    with store.states.passing((payload.offset, nbytes)):
                        _send(session, group, request.step, payload)
        return node_pb2.TransferStateResponse(nbytes=sum(nbytes for _, nbytes in parts))

    @_reports_defects
    def StageStates(
        self, request: node_pb2.StageStatesRequest, context: grpc.ServicerContext
    ) -> node_pb2.StageStatesResponse:
        states = self._states(request.job, context)
        try:
            return node_pb2.StageStatesResponse(staged=states.staging.make(request.states))
        except CirhError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    @_reports_defects
    def InitialiseStates(
        self, request: node_pb2.InitialiseStatesRequest, context: grpc.ServicerContext
    ) -> node_pb2.InitialiseStatesResponse:
        with self._locked_states(request.job, context) as states:
            _refuse_while_running(states, context)
            names = [state.name for state in request.states]
            _extents(names, states.store.extents(), context)
            states.store.before_write(names)

            def make(state: node_pb2.InitialState) -> None:
                target = states.store.tensor(state.name)
                extent = states.store.extents()[state.name]
                with states.store.states.passing((extent.offset, extent.nbytes)):
                    if state.HasField("program"):
                        initialisation.run(state.program, target)
                        return
                    staged = states.staging.take(state.name)
                    if staged is None or staged.numel() != target.numel() or staged.dtype != target.dtype:
                        raise NotStagedError(f"no such value of {state.name} was staged")
                    target.view(-1).copy_(staged)

            try:
                run_all(make, request.states)
            except NotStagedError as error:
                context.abort(grpc.StatusCode.DATA_LOSS, str(error))  # the client has the programs
            except CirhError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            states.store.mark_written(names)
            states.staging.clear()
        return node_pb2.InitialiseStatesResponse()

    def ReadRecoveryPoint(
        self, request: node_pb2.ReadRecoveryPointRequest, context: grpc.ServicerContext
    ) -> Iterator[node_pb2.RecoveryPointPart]:
        states = self._jobs.get(request.job)
        if states is None:  # the disk may have the point: it is not NOT_FOUND, after which nobody looks here again
            context.abort(grpc.StatusCode.UNAVAILABLE, f"{request.job} is not on this node")
        try:
            yield from parts_of(states.find_point(request.member, request.recovery_point))
        except (FileNotFoundError, ValueError) as error:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no such recovery point is here: {error}")
        except OSError as error:
            context.abort(grpc.StatusCode.DATA_LOSS, str(error))

    def _states(self, job: str, context: grpc.ServicerContext) -> JobStates:
        states = self._jobs.get(job)
        if states is None:
            _abort_without_job(job, context)
        return states

    @contextmanager
    def _locked_states(self, job: str, context: grpc.ServicerContext) -> Iterator[JobStates]:
        """Gives the states of a job to this call alone."""
        states = self._states(job, context)
        with states.lock:
            # The job may have ended while the call waited, and then its store is closed.
            if self._jobs.get(job) is not states:
                _abort_without_job(job, context)
            yield states

    @contextmanager
    def _transfer(
        self, request: node_pb2.TransferStateRequest, context: grpc.ServicerContext
    ) -> Iterator[tuple[JobStates, StateTransferSession]]:
        """Gives a transfer its session, which is closed, with its link, unless the transfer ends as it should."""
        with self._locked_states(request.job, context) as states:
            session = states.sessions.begin_transfer(request.token)
            if session is None:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such token: open the state first")
            ended = threading.Event()

            def end() -> None:
                if not ended.is_set():
                    session.hub.stop()

            try:
                if not context.add_callback(end):  # The call has ended already, so no frame for it will arrive.
                    end()
                yield states, session
                ended.set()
            except LinkLost as lost:
                context.abort(grpc.StatusCode.UNAVAILABLE, str(lost))
            except Stopped:
                context.abort(grpc.StatusCode.CANCELLED, "the transfer was broken off")
            finally:
                is_kept = ended.is_set()
                ended.set()
                states.sessions.end_transfer(request.token, is_kept=is_kept)


def _abort_without_job(job: str, context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.NOT_FOUND, f"this shard keeps no state of a job {job}")


def _refuse_while_running(states: JobStates, context: grpc.ServicerContext) -> None:
    if states.is_running():
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the state changes while an execution runs: take a snapshot")


def _extents(
    names: Sequence[str], extents: Mapping[str, StateExtent], context: grpc.ServicerContext
) -> list[StateExtent]:
    if len(names) > MAX_NAMES:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a call names at most {MAX_NAMES} states, not {len(names)}")
    unknown = [name for name in names if name not in extents]
    if unknown:
        context.abort(grpc.StatusCode.NOT_FOUND, f"this shard has no state {', '.join(unknown[:10])}")
    return [extents[name] for name in names]


def _parts(
    request: node_pb2.TransferStateRequest, extents: Sequence[StateExtent], context: grpc.ServicerContext
) -> list[tuple[int, int]]:
    """Returns, for each state, the offset and length in bytes of the part to send."""
    if not request.HasField("part"):
        return [(0, extent.nbytes) for extent in extents]
    part = request.part
    if len(extents) != 1 or part.offset + part.nbytes > extents[0].nbytes:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the part asked for does not lie within one state")
    return [(part.offset, part.nbytes)]


def _send(session: StateTransferSession, group: int, step: int, payload: Slice) -> None:
    session.hub.send(session.link(), group, step, payload, window=None, as_bytes=True)
