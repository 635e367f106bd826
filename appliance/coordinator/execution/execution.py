"""One execution: a plan loaded into all nodes, started, followed to its end; what the client hears of it, in order."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from appliance.coordinator.execution.results import BATCH_SECONDS, Results
from appliance.coordinator.execution.scalars import OnScalars
from appliance.coordinator.failures.verdict import JobFailed, Verdict, internal_failure
from appliance.coordinator.nodes.job_nodes import JobNodes
from appliance.coordinator.nodes.topology import COORDINATOR, Member
from interconnect.links.link import Link, LinkLost
from interconnect.links.listener import LinkListener
from nodes.steps.schedule import StepSchedule
from wsc.v1 import coordinator_pb2, node_pb2, plan_pb2

LOAD_SECONDS = 1800.0  # a wafer may have many kernels to compile
LINK_SECONDS = 20.0
STOP_SECONDS = 15.0
PROGRESS_SECONDS = 0.5


_T = TypeVar("_T")


class Abandoned(Exception):
    """The client has gone away from the execution."""


class Execution:
    """load, start, responses, stop: from one thread. The other methods: from any."""

    def __init__(
        self,
        *,
        job: str,
        number: int,
        begin: coordinator_pb2.Begin,
        plan: plan_pb2.Plan,
        run_ahead_steps: int,
        nodes: JobNodes,
        listener: LinkListener,
        verdict: Verdict,
        on_progress: Callable[[int], None],
        on_scalars: OnScalars,
    ) -> None:
        """on_progress(step) is called now and then while the client gets its outputs, and when all steps are done.

        on_scalars: as Results has it.
        """
        self.number = number
        self._job = job
        self._begin = begin
        self._plan = plan
        self._nodes = nodes
        self._listener = listener
        self._verdict = verdict
        self._on_progress = on_progress
        self._on_scalars = on_scalars
        self._start = node_pb2.Start(
            execution=number,
            num_steps=begin.num_steps,
            activation_steps=begin.activation_steps,
            checkpoint_steps=begin.checkpoint_steps,
            run_ahead_steps=run_ahead_steps,
        )
        self._schedule = StepSchedule.from_start(self._start)
        self._results: Results | None = None
        self._changed = threading.Condition()
        self._loaded: set[str] = set()
        self._finished: set[str] = set()
        self._stopped: set[str] = set()
        self._missing: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._snapshots: dict[int, set[str]] = defaultdict(set)
        self._input_states: dict[int, dict[str, bytes]] = defaultdict(dict)  # step, worker
        self._taken: set[int] = set()
        self._abandoned = False
        self._started = False
        self.stopping = False  # links end now, and nobody is to blame

    # --- what the client asks for -------------------------------------------------------------------------------------

    def load(self) -> coordinator_pb2.StateWanted:
        """Load the plan into all nodes and open all links. Raises JobFailed, Abandoned."""
        topology = self._nodes.topology
        specs = self._nodes.links()
        pending = {spec.purpose: self._listener.expect(spec.token, spec.peer) for spec in specs[COORDINATOR]}
        links: dict[int, Link] = {}
        try:
            self._nodes.send(topology.members(), lambda member: self._load_of(member, specs[member.name]))
            self._wait_for_all(self._loaded, "load the plan", LOAD_SECONDS)
            # A node that has loaded has opened its links: they are there.
            for purpose, one in pending.items():
                links[purpose] = one.wait(LINK_SECONDS)
            self._results = Results(
                self._plan,
                self._schedule,
                links,
                on_outputs=self.wake,
                on_failure=self._results_failed,
                on_scalars=self._on_scalars,
            )
        except BaseException:
            for link in links.values():
                link.close()
            for one in pending.values():
                one.close()
            raise
        return coordinator_pb2.StateWanted(missing=sorted(self._missing), shards=self._nodes.state_shards())

    def start(self) -> None:
        """Let all nodes begin; the states have been written."""
        assert self._results is not None
        self._results.start()
        self._nodes.send(self._nodes.topology.members(), lambda _: node_pb2.AttachRequest(start=self._start))
        self._started = True

    def responses(self) -> Iterator[coordinator_pb2.ExecuteResponse]:
        """Outputs and checkpoints in the order of the steps, and then the end. Raises JobFailed, Abandoned."""
        results = self._results
        assert results is not None
        shown = time.monotonic()
        num_shards = len(self._nodes.topology.state_keepers)
        shown_step = 0  # the last whose outputs were given to the client
        has_outputs = bool(self._plan.coordinator.outputs)
        for epoch_step in self._schedule.steps_for_client(has_outputs=has_outputs):
            step = self._schedule.global_step(epoch_step)
            if has_outputs and self._schedule.outputs_leave(epoch_step) and step > shown_step:
                while (outputs := self._wait(results.take, BATCH_SECONDS)) is None:
                    pass  # outputs that are too few for a batch may go by now
                shown_step = outputs.steps[-1].step
                yield coordinator_pb2.ExecuteResponse(outputs=outputs)
                if time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    self._on_progress(step)
            if self._schedule.keeps_snapshot(epoch_step):
                self._wait(partial(_has_size, self._snapshots[step], num_shards))
                ready = coordinator_pb2.CheckpointReady(step=step, input_states=self._take_input_states(step))
                yield coordinator_pb2.ExecuteResponse(checkpoint=ready)
        self._wait(lambda: self._all_in(self._finished))
        self._on_progress(self._begin.num_steps)
        # The nodes keep the last snapshot until they are told to stop.
        self._wait(lambda: self._schedule.checkpoint_steps <= self._taken)

    def finished(self) -> coordinator_pb2.ExecuteResponse:
        """The last message, after stop."""
        return coordinator_pb2.ExecuteResponse(finished=coordinator_pb2.ExecutionFinished(seconds=self._seconds))

    def consumed(self, step: int) -> None:
        """The client has done with the outputs of all steps up to this one."""
        if self._results is not None:
            self._results.consumed(step)

    def checkpoint_taken(self, step: int) -> None:
        """The client needs the snapshot of this step no more."""
        command = node_pb2.AttachRequest(release_snapshot=node_pb2.ReleaseSnapshot(step=step))
        self._nodes.send(self._nodes.topology.state_keepers, lambda _: command)
        with self._changed:
            self._taken.add(step)
            self._changed.notify_all()

    def abandon(self) -> None:
        """The client is not there any more: whatever waits raises Abandoned."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End the execution on all nodes, wherever it is. The state stays. Raises JobFailed."""
        with self._changed:
            self.stopping = True
            self._abandoned = False
        stop = node_pb2.AttachRequest(stop=node_pb2.Stop(execution=self.number))
        self._nodes.send(self._nodes.topology.members(), lambda _: stop)
        self._wait_for_all(self._stopped, "stop", STOP_SECONDS)

    def close(self) -> None:
        """Let go of the links; after stop, or because the job is over."""
        if self._results is not None:
            self._results.close()

    # --- what the nodes say -------------------------------------------------------------------------------------------

    def responded(self, member: Member, response: node_pb2.AttachResponse) -> None:
        """A node has got somewhere."""
        with self._changed:
            match response.WhichOneof("kind"):
                case "loaded" if response.loaded.execution == self.number:
                    self._loaded.add(member.name)
                    self._missing.update(response.loaded.missing_states)
                case "finished" if response.finished.execution == self.number:
                    self._finished.add(member.name)
                    for what, seconds in response.finished.seconds.items():
                        self._seconds[f"{member.name}.{what}"] = seconds
                case "snapshot":
                    self._snapshots[response.snapshot.step].add(member.name)
                case "input_state" if response.input_state.execution == self.number:
                    if response.input_state.step in self._schedule.checkpoint_steps:
                        self._input_states[response.input_state.step][member.name] = response.input_state.state
                case "stopped" if response.stopped.execution == self.number:
                    self._stopped.add(member.name)
            self._changed.notify_all()

    def reporting(self) -> list[str]:
        """The members that run steps now, and say about once a second how far they are."""
        if not self._started or self.stopping:
            return []
        with self._changed:
            return [m.name for m in self._nodes.topology.members() if m.name not in self._finished]

    def wake(self) -> None:
        """Something has changed that responses may wait for."""
        with self._changed:
            self._changed.notify_all()

    def _results_failed(self, error: Exception) -> None:
        if self.stopping:
            return
        if isinstance(error, LinkLost):
            failure = node_pb2.Failure(
                kind=node_pb2.Failure.KIND_NODE, node=COORDINATOR, message=str(error), peer=error.peer
            )
        else:
            failure = internal_failure(error)
        self._verdict.report(failure)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], _T | None], seconds: float | None = None) -> _T | None:
        """Until ready() is true, or for so many seconds. Raises JobFailed, Abandoned.

        Without a deadline it waits for nodes whose life and progress are watched: the verdict ends the wait.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                if self._verdict.failure is not None:
                    raise JobFailed(self._verdict.failure)
                if self._abandoned:
                    raise Abandoned
                value = ready()
                left = None if deadline is None else deadline - time.monotonic()
                if value or (left is not None and left <= 0):
                    return value
                self._changed.wait(left)

    def _wait_for_all(self, done: set[str], doing: str, seconds: float) -> None:
        """Until all members are among those that have done it; those that have not in time fail the job."""
        if self._wait(lambda: self._all_in(done), seconds):
            return
        with self._changed:
            late = [member.name for member in self._nodes.topology.members() if member.name not in done]
        failure = node_pb2.Failure(
            kind=node_pb2.Failure.KIND_NODE,
            node=late[0],
            message=f"{', '.join(late)} did not {doing} within {seconds:g} s",
        )
        self._verdict.report(failure)
        raise JobFailed(failure)

    def _take_input_states(self, step: int) -> list[bytes]:
        """Where the loaders of all workers stand after a step; waits for them."""
        if not self._begin.wants_input_states:
            return []
        workers = self._nodes.topology.workers
        self._wait(lambda: len(self._input_states[step]) == len(workers))
        with self._changed:
            states = self._input_states.pop(step)
        return [states[worker.name] for worker in workers]

    def _all_in(self, names: set[str]) -> bool:
        return len(names) == len(self._nodes.topology.members())

    def _load_of(self, member: Member, links: list[node_pb2.LinkSpec]) -> node_pb2.AttachRequest:
        load = node_pb2.Load(execution=self.number, links=links)
        match member.role:
            case node_pb2.ROLE_WAFER if self._plan.HasField("pipeline"):
                load.pipeline.CopyFrom(self._plan.pipeline)
            case node_pb2.ROLE_WAFER:
                load.wafer.CopyFrom(self._plan.wafer)
                load.wafer_number = member.index
            case node_pb2.ROLE_MEMORYX:
                load.memoryx.CopyFrom(self._plan.memoryx[member.index])
            case node_pb2.ROLE_SWARMX:
                load.swarmx.CopyFrom(self._plan.swarmx)
            case node_pb2.ROLE_WORKER:
                load.worker.CopyFrom(self._plan.worker)
                load.loader = self._begin.loader
                if self._begin.wants_input_states:
                    load.state_steps.extend(sorted(self._schedule.checkpoint_steps))
        return node_pb2.AttachRequest(load=load)


def _has_size(names: set[str], size: int) -> bool:
    return len(names) == size
