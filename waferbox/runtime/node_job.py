"""The life of one job on one node, as the roles see it: what a role implements, and what it is given.

run_node (waferbox.runtime.node) makes one NodeJob for every job that leases the process. All methods of a NodeJob are
called from one thread, one after the other, in the order of the coordinator's messages; close is always the last.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from waferbox import deadlines
from waferbox.host.threads import CancellationToken
from waferbox.links.dialling import dial
from waferbox.links.link import Link
from waferbox.links.listener import LinkListener
from wsc.v1 import node_pb2, observation_pb2

LinkKey: TypeAlias = "tuple[node_pb2.LinkPurpose.ValueType, int]"  # purpose, index


class JobFailure(RuntimeError):
    """What ends the job, with what the user is told. To be raised in any method of a NodeJob, or in its execution."""

    def __init__(
        self, kind: "node_pb2.Failure.Kind.ValueType", message: str, *, traceback: str = "", peer: str = ""
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.traceback = traceback
        self.peer = peer


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What a role needs to know of the job, and the way back to the coordinator."""

    job: str
    node: str  # the node's name in the job, such as "wafer-0"
    index: int
    lane: "node_pb2.Lane.ValueType"
    listener: LinkListener
    emit: Callable[[node_pb2.AttachResponse], None]  # to the coordinator; from any thread, never blocks

    def fail(
        self,
        kind: "node_pb2.Failure.Kind.ValueType",
        message: str,
        traceback: str = "",
        peer: str = "",
        *,
        is_unfit: bool = False,
    ) -> None:
        """Tell the coordinator that the job cannot go on; is_unfit: with this node. From any thread."""
        failure = node_pb2.Failure(
            kind=kind, node=self.node, message=message, traceback=traceback, peer=peer, is_unfit=is_unfit
        )
        self.emit(node_pb2.AttachResponse(failed=failure))

    def open_links(self, specs: Iterable[node_pb2.LinkSpec], cancellation: CancellationToken) -> dict[LinkKey, Link]:
        """Open all links of a Load. LinkLost, naming the peer, when one does not come in time, or it is cancelled."""
        specs = list(specs)
        deadline = time.monotonic() + deadlines.LINKS.open
        opened: dict[LinkKey, Link] = {}
        awaited = [(spec, self.listener.expect(spec.token, spec.peer)) for spec in specs if not spec.dial]
        try:
            for spec in specs:
                if spec.dial:
                    opened[spec.purpose, spec.index] = dial(
                        spec.endpoint,
                        spec.token,
                        name=spec.peer,
                        own_name=self.node,
                        lane=self.lane,
                        deadline_seconds=deadline - time.monotonic(),
                        cancellation=cancellation,
                    )
            with ExitStack() as waits:
                for _, pending in awaited:
                    waits.enter_context(cancellation.on_cancel(pending.close))
                for spec, pending in awaited:
                    opened[spec.purpose, spec.index] = pending.wait(deadline - time.monotonic())
        except BaseException:
            for link in opened.values():
                link.close()
            for _, pending in awaited:
                pending.close()
            raise
        return opened


class NodeJob(Protocol):
    """One job on one node. An exception out of any method but close becomes the job's Failure."""

    def prepare_input(self, request: node_pb2.PrepareInput) -> None:
        """Workers: start the child with the input_fn. Other roles: JobFailure."""

    def load(self, request: node_pb2.Load, cancellation: CancellationToken) -> Sequence[str]:
        """Open the links and compile the plan part, in place of the execution before. Returns missing states.

        cancellation: nobody wants the execution any more; what the wait for its links raises then is not told.
        """

    def start(self, request: node_pb2.Start) -> None:
        """Start the thread of the execution (waferbox.runtime.role_job), which reports Finished or Failed by itself."""

    def stop(self, epoch: int) -> None:
        """Ends the epoch, whether it runs, has finished or is only loaded: thread and links. States stay."""

    def release_snapshot(self, step: int) -> None:
        """MemoryX: the snapshot of this step is no longer wanted."""

    def keep_recovery_point(self, request: node_pb2.KeepRecoveryPoint) -> None:
        """Keep what the job would go on from, as of the end of a step; no effect on a node that is beyond it."""

    def drop_recovery_points(self, before: int) -> None:
        """MemoryX: remove the recovery points with smaller numbers. Other roles: nothing."""

    def copy_recovery_point(self, request: node_pb2.CopyRecoveryPoint) -> None:
        """MemoryX: keep a copy of another's file of a recovery point."""

    def report(self) -> observation_pb2.NodeReport | None:
        """How it goes, while an execution runs. From any thread."""

    def check_progress(self) -> None:
        """Say so if the execution hangs. About once a second, from one thread."""

    def trace(self, request: observation_pb2.Trace) -> None:
        """Record some steps; Spans are emitted when that is done, and none when the execution is over."""

    def close(self) -> None:
        """The job is over, however it ended: stop the execution, drop everything that belongs to the job."""
