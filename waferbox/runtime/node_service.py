"""NodeService: the coordinator that leases a node attaches to it, sends commands, and has it until the stream ends."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial

import grpc

from waferbox import deadlines
from waferbox.host.threads import CancellationToken, GuardedThread
from waferbox.links.listener import LinkListener
from waferbox.runtime.node_job import JobContext, NodeJob
from waferbox.runtime.outbox import JobLogHandler, Outbox
from waferbox.runtime.role_job import StepThreadHangs, report_failure
from waferbox.security.guard import caller_of
from waferbox.security.tokens import Kind
from wsc.v1 import node_pb2, node_pb2_grpc, observation_pb2

# --- Leases -----------------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


class Leases:
    """The leases that coordinators have shown to a node. The latest alone is valid. Thread-safe."""

    def __init__(self, instance: Callable[[], str]) -> None:
        """instance: returns the name of the node's current registration."""
        self._instance = instance
        self._lock = threading.Lock()
        self._last = 0  # the number of the latest lease that was shown

    def job_of(self, context: grpc.ServicerContext) -> str:
        """Returns the job whose coordinator calls. Aborts the call: its lease is of another node, or has ended."""
        caller = caller_of(context.invocation_metadata())
        if caller is None or caller.kind is not Kind.LEASE:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no lease of this node was shown")
        job, instance, number = caller.names
        with self._lock:
            is_valid = instance == self._instance() and int(number) >= self._last
            if is_valid:
                self._last = int(number)
        if not is_valid:
            logger.warning("%s has no lease of this node: %s is not %s, or is over", job, instance, self._instance())
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "the lease is of another node, or is over")
        return job


# --- The service ------------------------------------------------------------------------------------------------------

MAX_COMMANDS = 16  # read ahead


class NodeService(node_pb2_grpc.NodeServiceServicer):
    """The service of a node, for one job at a time. Thread-safe."""

    def __init__(
        self,
        make_job: Callable[[JobContext], NodeJob],
        listener: LinkListener,
        leases: Leases,
        on_hang: Callable[[str], None],
    ) -> None:
        """
        Args:
            make_job: makes the job of each coordinator that attaches.
            listener: the listener of the node.
            leases: decides which coordinator may attach.
            on_hang: called with a message when an execution does not end, so that the process must exit.
        """
        self._make_job = make_job
        self._listener = listener
        self._leases = leases
        self._on_hang = on_hang
        self._free = threading.Semaphore(1)
        self._attached_job = node_pb2.AttachJob()
        self._job: NodeJob | None = None

    def report(self) -> observation_pb2.NodeReport | None:
        """Returns the figures of the running execution; None: none runs."""
        job = self._job
        return None if job is None else job.report()

    @property
    def attached_job(self) -> node_pb2.AttachJob:
        """The job that has the node, and the node's name in it; empty while there is none."""
        return self._attached_job

    def Attach(
        self, request_iterator: Iterator[node_pb2.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[node_pb2.AttachResponse]:
        job = self._leases.job_of(context)
        if not self._free.acquire(timeout=deadlines.ATTACHMENT.previous_job):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this node works for job {self._attached_job.job}")
        outbox = Outbox()

        def on_defect(error: Exception) -> None:
            outbox.fail(error)
            self._leave(outbox)

        serve = partial(self._serve, job, request_iterator, outbox)
        GuardedThread(serve, name="attachment", on_defect=on_defect).start()
        # After the death of the coordinator gRPC iterates no further; the thread ends with the requests.
        try:
            yield from outbox
        except Exception as error:
            logger.exception("a defect in what a node reports")
            yield outbox.failure(error)

    def close(self) -> None:
        """Waits until the job is dropped, after the server was stopped, which ends its stream."""
        if not self._free.acquire(timeout=deadlines.ATTACHMENT.close):
            logger.error("job %s was not dropped within %g s", self._attached_job.job, deadlines.ATTACHMENT.close)

    def _serve(self, job: str, requests: Iterator[node_pb2.AttachRequest], outbox: Outbox) -> None:
        """Serves one job, from its first message to the end of its stream."""
        first = None
        with contextlib.suppress(grpc.RpcError):  # The coordinator has died before its first message.
            first = next(requests, None)
        if first is not None and first.WhichOneof("kind") == "attach" and first.attach.job == job:
            self._attached_job = first.attach
            job_context = JobContext(
                job=first.attach.job,
                node=first.attach.node,
                index=first.attach.index,
                lane=first.attach.lane,
                listener=self._listener,
                emit=outbox.put,
            )
            with JobLogHandler(job_context.node, outbox.log):
                self._work(job_context, _Commands(requests, outbox.fail), outbox)
        self._leave(outbox)

    def _leave(self, outbox: Outbox) -> None:
        """Frees the node for the next job."""
        self._attached_job = node_pb2.AttachJob()
        self._free.release()
        outbox.close()

    def _work(self, context: JobContext, commands: "_Commands", outbox: Outbox) -> None:
        job = self._job = self._make_job(context)
        try:
            outbox.open(context.node, job.report, job.check_progress)
            outbox.put(node_pb2.AttachResponse(attached=node_pb2.Attached(endpoint=self._listener.endpoint())))
            for command, cancellation in commands:
                try:
                    _dispatch(job, command, cancellation, outbox)
                except Exception as error:  # noqa: BLE001 - all are reported to the coordinator
                    if not cancellation.cancelled:
                        report_failure(context, error)
        finally:
            self._job = None
            try:
                job.close()
            except StepThreadHangs as error:
                self._on_hang(f"{context.node} of {context.job}: {error}")


class _Commands:
    """The commands of a coordinator, each with a token. A thread reads ahead, as a later command may end a wait."""

    def __init__(self, requests: Iterator[node_pb2.AttachRequest], on_defect: Callable[[Exception], None]) -> None:
        """on_defect: called with the exception that has ended the thread, and with it the commands."""
        self._requests = requests
        self._on_defect = on_defect
        self._read: queue.Queue[tuple[node_pb2.AttachRequest, CancellationToken] | None] = queue.Queue(MAX_COMMANDS)
        self._ended = CancellationToken()
        self._load = CancellationToken()  # the token of the last Load
        self._loaded = 0  # the epoch of the last Load

    def __iter__(self) -> Iterator[tuple[node_pb2.AttachRequest, CancellationToken]]:
        """Yields the commands, once. A token is cancelled when the answer is not needed any more.

        This is at the end of the stream, and for a Load when its epoch is stopped or replaced by another.
        """
        reader = GuardedThread(self._read_ahead, name="commands", on_defect=self._failed)
        reader.start()
        yield from iter(self._read.get, None)
        reader.join()

    def _read_ahead(self) -> None:
        with contextlib.suppress(grpc.RpcError):  # The coordinator has cancelled the call or died: the job ends.
            for request in self._requests:
                self._read.put((request, self._token(request)))
        self._end()

    def _token(self, request: node_pb2.AttachRequest) -> CancellationToken:
        match request.WhichOneof("kind"):
            case "load":
                self._load.cancel()
                self._load, self._loaded = CancellationToken(), request.load.epoch
                return self._load
            case "stop" if request.stop.epoch == self._loaded:
                self._load.cancel()
        return self._ended

    def _failed(self, error: Exception) -> None:
        self._on_defect(error)
        self._end()

    def _end(self) -> None:
        self._ended.cancel()
        self._load.cancel()
        self._read.put(None)


def _dispatch(job: NodeJob, request: node_pb2.AttachRequest, cancellation: CancellationToken, outbox: Outbox) -> None:
    match request.WhichOneof("kind"):
        case "prepare_input":
            job.prepare_input(request.prepare_input)
        case "load":
            missing = job.load(request.load, cancellation)
            loaded = node_pb2.Loaded(epoch=request.load.epoch, missing_states=missing)
            outbox.put(node_pb2.AttachResponse(loaded=loaded))
        case "start":
            job.start(request.start)
        case "stop":
            job.stop(request.stop.epoch)
            stopped = node_pb2.Stopped(epoch=request.stop.epoch)
            outbox.put(node_pb2.AttachResponse(stopped=stopped))
        case "release_snapshot":
            job.release_snapshot(request.release_snapshot.step)
        case "keep_recovery_point":
            job.keep_recovery_point(request.keep_recovery_point)
        case "drop_recovery_points":
            job.drop_recovery_points(request.drop_recovery_points.before)
        case "copy_recovery_point":
            job.copy_recovery_point(request.copy_recovery_point)
        case "trace":
            job.trace(request.trace)
        case kind:
            logger.warning("a message that this node does not know: %s", kind)
