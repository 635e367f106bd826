"""One job on one node: the interface that a role implements, and the context that it gets.

run_node (waferbox.runtime.node) makes one NodeJob for every job that leases the process. One thread calls all methods
of a NodeJob, in the order of the coordinator's messages, unless they say otherwise; `close` is the last.
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
    """Raised by a NodeJob or its execution to end the job, or its work on this node, with a message for the user."""

    def __init__(
        self,
        kind: "node_pb2.Failure.Kind.ValueType",
        message: str,
        *,
        traceback: str = "",
        peer: str = "",
        is_unfit: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.traceback = traceback
        self.peer = peer
        self.is_unfit = is_unfit  # another node could continue
        self.step = 0  # of the execution, which could not be run; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """The place of a node in a job, and its connection to the coordinator. Thread-safe."""

    job: str
    node: str  # the node's name in the job, such as "wafer-0"
    index: int
    lane: "node_pb2.Lane.ValueType"
    listener: LinkListener
    emit: Callable[[node_pb2.AttachResponse], None]  # to the coordinator; from any thread, never blocks

    def open_links(self, specs: Iterable[node_pb2.LinkSpec], cancellation: CancellationToken) -> dict[LinkKey, Link]:
        """Opens all links of a Load. Raises LinkLost, with the peer: a link does not open in time, or is cancelled."""
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
    """One job on one node. An exception of any method but `close` is reported as the job's Failure."""

    def prepare_input(self, request: node_pb2.PrepareInput) -> None:
        """Workers: starts the process of the input_fn. Other roles raise JobFailure."""

    def load(self, request: node_pb2.Load, cancellation: CancellationToken) -> Sequence[str]:
        """Opens the links and compiles the role's part of the plan. It replaces the epoch before.

        Args:
            request: the command.
            cancellation: ends the wait for links; its exception is not reported then.

        Returns:
            The names of states without a value.
        """

    def start(self, request: node_pb2.Start) -> None:
        """Starts the thread of the epoch (waferbox.runtime.role_job), which reports its end itself."""

    def stop(self, epoch: int) -> None:
        """Ends the epoch, whether it runs, has finished or is only loaded: thread and links. States stay."""

    def release_snapshot(self, step: int) -> None:
        """State keepers: releases the snapshot of a step."""

    def keep_recovery_point(self, request: node_pb2.KeepRecoveryPoint) -> None:
        """Makes a recovery point after a step, unless the step has passed."""

    def drop_recovery_points(self, before: int) -> None:
        """State keepers: removes the recovery points with smaller numbers. Other roles do nothing."""

    def copy_recovery_point(self, request: node_pb2.CopyRecoveryPoint) -> None:
        """State keepers: makes a copy of another member's point share."""

    def report(self) -> observation_pb2.NodeReport | None:
        """Returns the figures of the execution; None: none runs. From any thread."""

    def check_progress(self) -> None:
        """Reports a failure if the execution hangs. Called about once a second, by another thread."""

    def trace(self, request: observation_pb2.Trace) -> None:
        """Records some steps, whose Spans are emitted then; none after the end of the execution."""

    def close(self) -> None:
        """Stops the execution, and drops all that belongs to the job, which has ended."""
