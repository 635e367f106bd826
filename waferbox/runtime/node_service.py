"""NodeService: the coordinator that leases a node attaches to it, sends commands, and has it until the stream ends."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol, TypeAlias

import grpc

from waferbox import deadlines
from waferbox.host.event_loop import Changes, from_any_thread
from waferbox.host.threads import CancellationToken
from waferbox.rpc.loop_method import CallContext
from waferbox.runtime.outbox import JobLogHandler, Outbox
from waferbox.runtime.role_job import StepThreadHangs, failure_of
from waferbox.security.guard import caller_of
from waferbox.security.tokens import Kind
from wsc.v1 import node_pb2, observation_pb2

logger = logging.getLogger(__name__)

MAX_COMMANDS: Final = 16  # read ahead

Emit: TypeAlias = Callable[[node_pb2.AttachResponse], None]


class AttachedJob(Protocol):
    """The job that has a node, as the service of the node uses it, in its event loop."""

    def report(self) -> observation_pb2.NodeReport | None:
        """Returns the figures of the execution; None: none runs."""

    def check_progress(self) -> None:
        """Reports a failure if the execution hangs. Called about once a second."""

    async def execute(
        self, command: node_pb2.AttachRequest, cancellation: CancellationToken
    ) -> node_pb2.AttachResponse | None:
        """Executes one command after the other; returns its answer, if it has one.

        Its exceptions are reported as the job's failure, unless the token was cancelled before.
        """

    async def close(self) -> None:
        """Stops the execution, and drops all that belongs to the job. Raises StepThreadHangs."""


class NodeService:
    """The service of a node, for one job at a time. Used in one event loop."""

    def __init__(
        self,
        make_job: Callable[[node_pb2.AttachJob, Emit], AttachedJob],
        endpoint: Callable[[], node_pb2.LinkEndpoint],
        instance: Callable[[], str],
        on_hang: Callable[[str], None],
    ) -> None:
        """
        Args:
            make_job: makes the job of each coordinator that attaches. The function that it gets sends responses to the
                coordinator, from any thread.
            endpoint: returns the addresses for links to the node.
            instance: returns the name of the node's current registration.
            on_hang: called with a message when an execution does not end, so that the process must exit.
        """
        self._make_job = make_job
        self._endpoint = endpoint
        self._instance = instance
        self._on_hang = on_hang
        self._last_lease = 0  # the number of the latest lease that was shown, which alone is valid
        self._free = asyncio.Lock()
        self._attached_job = node_pb2.AttachJob()
        self._job: AttachedJob | None = None
        self._serving: set[asyncio.Task[None]] = set()

    def report(self) -> observation_pb2.NodeReport | None:
        """Returns the figures of the running execution; None: none runs. From any thread."""
        job = self._job
        return None if job is None else job.report()

    @property
    def attached_job(self) -> node_pb2.AttachJob:
        """The job that has the node, and the node's name in it; empty while there is none."""
        return self._attached_job

    async def Attach(
        self, request_iterator: AsyncIterator[node_pb2.AttachRequest], context: CallContext
    ) -> AsyncIterator[node_pb2.AttachResponse]:
        job = await self._leased_to(context)
        try:
            async with asyncio.timeout(deadlines.ATTACHMENT.previous_job):
                await self._free.acquire()
        except TimeoutError:
            reason = f"this node works for job {self._attached_job.job}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        outbox, commands = Outbox(), _Commands(request_iterator)
        serving = asyncio.create_task(self._serve(job, commands, outbox))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        try:
            async for response in outbox.responses():
                yield response
        except Exception as error:
            logger.exception("a defect in what a node reports")
            yield node_pb2.AttachResponse(failed=failure_of(self._attached_job.node, error))
        finally:
            commands.end()  # the coordinator has died; the task goes on until the job is dropped

    async def close(self) -> None:
        """Waits until the job is dropped, after the server was stopped, which ends its stream."""
        if self._serving and (await asyncio.wait(self._serving, timeout=deadlines.ATTACHMENT.close))[1]:
            logger.error("job %s was not dropped within %g s", self._attached_job.job, deadlines.ATTACHMENT.close)

    async def _leased_to(self, context: CallContext) -> str:
        """Returns the job whose coordinator calls. Aborts the call: its lease is of another node, or has ended."""
        caller = caller_of(context.invocation_metadata())
        if caller is None or caller.kind is not Kind.LEASE:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no lease of this node was shown")
        job, instance, number = caller.names
        if instance != self._instance() or int(number) < self._last_lease:
            logger.warning("%s has no lease of this node: %s is not %s, or is over", job, instance, self._instance())
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the lease is of another node, or is over")
        self._last_lease = int(number)
        return job

    async def _serve(self, job: str, commands: "_Commands", outbox: Outbox) -> None:
        """Serves one job, from its first message to the end of its stream."""
        try:
            async for first, _ in commands:
                if first.WhichOneof("kind") == "attach" and first.attach.job == job:
                    self._attached_job = first.attach
                    with JobLogHandler(first.attach.node, from_any_thread(outbox.log)):
                        await self._work(first.attach, commands, outbox)
                break
        except Exception as error:
            logger.exception("a defect in the service of job %s", job)
            outbox.put(node_pb2.AttachResponse(failed=failure_of(self._attached_job.node, error)))
        finally:
            commands.end()
            self._attached_job = node_pb2.AttachJob()
            self._free.release()
            outbox.close()

    async def _work(self, attach: node_pb2.AttachJob, commands: "_Commands", outbox: Outbox) -> None:
        job = self._job = self._make_job(attach, from_any_thread(outbox.put))
        try:
            outbox.open(attach.node, job.report, job.check_progress)
            outbox.put(node_pb2.AttachResponse(attached=node_pb2.Attached(endpoint=self._endpoint())))
            async for command, cancellation in commands:
                try:
                    answer = await job.execute(command, cancellation)
                except Exception as error:  # noqa: BLE001 - all are reported to the coordinator
                    if not cancellation.cancelled:
                        outbox.put(node_pb2.AttachResponse(failed=failure_of(attach.node, error)))
                else:
                    if answer is not None:
                        outbox.put(answer)
        finally:
            self._job = None
            try:
                await job.close()
            except StepThreadHangs as error:
                self._on_hang(f"{attach.node} of {attach.job}: {error}")


class _Commands:
    """The commands of a coordinator, each with a token. They are read ahead, as a later command may end a wait."""

    def __init__(self, requests: AsyncIterator[node_pb2.AttachRequest]) -> None:
        self._requests = requests
        self._changes = Changes()
        self._read: deque[tuple[node_pb2.AttachRequest, CancellationToken]] = deque()
        self._ended = CancellationToken()
        self._load = CancellationToken()  # the token of the last Load
        self._loaded = 0  # the epoch of the last Load
        self._reading = asyncio.create_task(self._read_ahead())
        self._reading.add_done_callback(lambda _: self._cancel_tokens())

    async def __aiter__(self) -> AsyncIterator[tuple[node_pb2.AttachRequest, CancellationToken]]:
        """Yields the commands that were not yet yielded. A token is cancelled when the answer is not needed any more.

        This is at the end of the stream, and for a Load when its epoch is stopped or replaced by another.
        """
        while await self._changes.until(lambda: self._read or self._reading.done()) and self._read:
            yield self._read.popleft()
            self._changes.notify()
        if not self._reading.cancelled():
            self._reading.result()  # raises its exception

    def end(self) -> None:
        """Cancels all tokens, and reads no more."""
        self._reading.cancel()
        self._cancel_tokens()

    def _cancel_tokens(self) -> None:
        self._ended.cancel()
        self._load.cancel()
        self._changes.notify()

    async def _read_ahead(self) -> None:
        async for request in self._requests:
            token = self._token(request)
            await self._changes.until(lambda: len(self._read) < MAX_COMMANDS)
            self._read.append((request, token))
            self._changes.notify()

    def _token(self, request: node_pb2.AttachRequest) -> CancellationToken:
        match request.WhichOneof("kind"):
            case "load":
                self._load.cancel()
                self._load, self._loaded = CancellationToken(), request.load.epoch
                return self._load
            case "stop" if request.stop.epoch == self._loaded:
                self._load.cancel()
        return self._ended
