"""An epoch of an execution: a plan is loaded into all nodes and run, until the steps end or a node dies."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from appliance.coordinator.execution.failures import Verdict, internal_failure
from appliance.coordinator.execution.output_links import OutputLinks, Outputs
from appliance.coordinator.execution.recovery_points import RecoveryPoint
from appliance.coordinator.execution.results import OnScalars, OutputCallbacks
from appliance.coordinator.execution.waiting import EpochOver, Waiting
from appliance.coordinator.nodes.job_nodes import JobMembers
from appliance.coordinator.nodes.topology import COORDINATOR, Member
from waferbox import deadlines
from waferbox.links.link import LinkLost
from waferbox.runtime.schedule import StepSchedule
from wsc.v1 import coordinator_pb2, node_pb2, plan_pb2

SAME_NUMBERS = (
    "a tensor of integers in the batch, in which every sample has another value, is the same on all {num_csx} wafers, "
    "and the step works over the samples of all of them: labels that number the samples of a part "
    "(`torch.arange(len(part))`) point to the first wafer's. Count on from the samples of the wafers before: "
    "`torch.arange(n) + cstorch.distributed.get_streaming_rank() // cstorch.distributed.num_workers_per_csx() * n`; or "
    "let the input_fn return whole batches, which are divided for it"
)
OTHER_FIRST_BATCH = (
    "the first batch that the input_fn makes for the cluster is not the one that it makes in the script, so that the "
    "cluster trains on other data. The input_fn runs in the processes of the workers, which import its modules anew: "
    "what the script sets in a module, a class or os.environ does not reach it there. Pass it as an argument, "
    "`cstorch.utils.data.DataLoader(input_fn, config)`, or put variables into "
    "`cerebras.appliance.environment.appliance_environ`. If the input_fn draws from a generator of its own, seed it: "
    "its batches are others in each run"
)


def _works_over_samples(plan: plan_pb2.Plan) -> bool:
    """Whether a wafer receives rows that other wafers computed from their samples."""
    # SwarmX gathers such rows by a sum of tensors with the rows of the whole batch, zero but for the sender's own.
    members = (member for group in plan.swarmx.groups if group.to_wafers for member in group.members)
    return any(plan.batch_rows in member.type.shape for member in members)


class Epoch:
    """One epoch on the nodes of the job: loads the plan, starts the steps, and notes the nodes' responses."""

    def __init__(
        self,
        *,
        begin: coordinator_pb2.Begin,
        plan: plan_pb2.Plan,
        start: node_pb2.Start,
        point: RecoveryPoint | None,
        nodes: JobMembers,
        links: OutputLinks,
        verdict: Verdict,
        waiting: Waiting,
        on_outputs: Callable[[float], None],
        on_failure: Callable[[node_pb2.Failure], None],
        on_scalars: OnScalars,
        on_finding: Callable[[str], None],
    ) -> None:
        """Prepares an epoch; load begins it.

        Args:
            begin: the client's request.
            plan: of the step.
            start: the message for the nodes, with the number of the epoch and the steps that are done.
            point: the recovery point that state keepers restore; None: their states are valid.
            nodes: the members of the job.
            links: of the coordinator.
            verdict: the reason why the job ends.
            waiting: of the execution.
            on_outputs: called with the seconds after which outputs can be taken.
            on_failure: called when a link of the coordinator fails.
            on_scalars: called with sampled outputs.
            on_finding: called with what the script does otherwise than it says.
        """
        self.number = start.epoch
        self.over = False  # from now on the end of a link is no failure
        self.started = False
        self.last_recovery_point = 0
        self.finished: set[str] = set()  # names of members
        self.missing: set[str] = set()  # names of states
        self.seconds: dict[str, float] = {}
        self.input_failure: node_pb2.Failure | None = None  # the one with the first step
        self._without_input: set[str] = set()  # names of workers whose steps have ended for want of input
        self._snapshots: dict[int, set[str]] = defaultdict(set)
        self._input_states: dict[int, dict[str, bytes]] = defaultdict(dict)  # by step and worker
        self._loaded: set[str] = set()
        self._stopped: set[str] = set()
        self._begin = begin
        self._plan = plan
        self._start = start
        self._point = point
        self._nodes = nodes
        self._links = links
        self._verdict = verdict
        self._waiting = waiting
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._on_scalars = on_scalars
        self._on_finding = on_finding
        self._digests: dict[str, set[bytes]] = {}  # by worker
        self.schedule = StepSchedule.from_start(start)
        self.results: Outputs | None = None

    @property
    def all_finished(self) -> bool:
        return len(self.finished) == len(self._nodes.topology.members())

    def has_snapshot(self, step: int) -> bool:
        """Whether all state keepers have the snapshot of a step."""
        return len(self._snapshots[step]) == len(self._nodes.topology.state_keepers)

    def input_states(self, step: int) -> list[bytes]:
        """The states of all workers' loaders after a step, wafer by wafer; empty until all are known."""
        if self._point is not None and step == self._start.done_steps:
            return list(self._point.input_states)
        states, workers = self._input_states[step], self._nodes.topology.workers
        return [states[worker.name] for worker in workers] if len(states) == len(workers) else []

    async def load(self) -> None:
        """Loads the plan into all nodes and opens all links. Raises JobFailed, Abandoned, EpochOver."""
        await self._waiting.until(lambda: True, epoch=self)  # raises if a node is missing
        specs = self._nodes.links(self._links.endpoint())
        expected = self._links.expect(specs[COORDINATOR])
        try:
            members = self._nodes.topology.members()
            self._nodes.load(members, self._plan, lambda member: self._load_of(member, specs[member.name]))
            await self._wait_for_loaded(members)
            callbacks = OutputCallbacks(
                on_outputs=self._on_outputs, on_failure=self._results_failed, on_scalars=self._on_scalars
            )
            self.results = await expected.open(self._plan, self.schedule, callbacks)
        except LinkLost as error:
            raise EpochOver from error  # the death of the node is reported elsewhere
        finally:
            expected.close()

    async def restore(self) -> None:
        """Loads the plan into the state keepers only, without links, to restore their states. Raises as load."""
        keepers = self._nodes.topology.state_keepers
        self._nodes.load(keepers, self._plan, lambda member: self._load_of(member, []))
        await self._wait_for_loaded(keepers)
        self.over = True

    def start(self, recovery_point: int = 0, last_recovery_point: int = 0) -> None:
        """Starts the steps on all nodes, after the client has written the states.

        Args:
            recovery_point: number of the point to write before the first step; 0: none.
            last_recovery_point: number of the point to write after the last step; 0: none.
        """
        assert self.results is not None
        start = self._start
        start.recovery_point, start.last_recovery_point = recovery_point, last_recovery_point
        self.last_recovery_point = last_recovery_point
        self.results.start()
        self._nodes.send(self._nodes.topology.members(), lambda _: node_pb2.AttachRequest(start=start))
        self.started = True

    def finish(self) -> None:
        """Marks the epoch as over: from now on the end of a link or a stream is no failure."""
        self.over = True

    async def stop(self, members: Sequence[Member]) -> Sequence[Member]:
        """Ends the epoch on these nodes, at any step; the states stay.

        Returns:
            The nodes that did not answer within deadlines.ATTACHMENT.stop.

        Raises:
            JobFailed: the job has failed.
        """
        self.finish()
        stop = node_pb2.AttachRequest(stop=node_pb2.Stop(epoch=self.number))
        self._nodes.send(members, lambda _: stop)

        def late() -> list[Member]:
            return [m for m in members if m.name not in self._stopped and self._nodes.answers(m)]

        await self._waiting.until(lambda: not late(), deadlines.ATTACHMENT.stop)
        return late()

    async def close(self) -> None:
        """Closes the links; after stop, or when the job is over."""
        if self.results is not None:
            await self.results.close()

    def responded(self, member: Member, response: node_pb2.AttachResponse) -> None:
        """Notes a node's response; responses to other epochs are ignored."""
        match response.WhichOneof("kind"):
            case "loaded" if response.loaded.epoch == self.number:
                self._loaded.add(member.name)
                self.missing.update(response.loaded.missing_states)
            case "finished" if response.finished.epoch == self.number:
                self.finished.add(member.name)
                for what, seconds in response.finished.seconds.items():
                    self.seconds[f"{member.name}.{what}"] = seconds
            case "snapshot" if not self.over:
                self._snapshots[response.snapshot.step].add(member.name)
            case "input_state" if response.input_state.epoch == self.number:
                if response.input_state.step in self._input_state_steps():
                    self._input_states[response.input_state.step][member.name] = response.input_state.state
            case "input_digests" if response.input_digests.epoch == self.number:
                self._digests[member.name] = set(response.input_digests.digests)
                self._compare_parts()
                made, expected = response.input_digests.first_batch, self._begin.first_batch
                # An input_fn that makes the part of its wafer gives the client's batch another layout.
                if made.values and made.layout == expected.layout and made.values != expected.values:
                    self._on_finding(OTHER_FIRST_BATCH)
            case "stopped" if response.stopped.epoch == self.number:
                self._stopped.add(member.name)

    def input_failed(self, failure: node_pb2.Failure) -> None:
        """Notes that a step has no input."""
        self._without_input.add(failure.node)
        if self.input_failure is None or failure.step < self.input_failure.step:
            self.input_failure = failure

    def _compare_parts(self) -> None:
        """Warns the user if the parts of the wafers number their samples alike and the step mixes samples."""
        workers = self._nodes.topology.workers
        first = [worker.name for worker in workers[:: len(workers) // self._plan.num_csx]]
        if not all(name in self._digests for name in first) or not _works_over_samples(self._plan):
            return
        if set.intersection(*(self._digests.pop(name) for name in first)):
            self._on_finding(SAME_NUMBERS.format(num_csx=self._plan.num_csx))

    def reporting(self) -> list[str]:
        """The members that run steps, and so send a report about once a second."""
        if not self.started or self.over:
            return []
        ended = self.finished | self._without_input
        return [m.name for m in self._nodes.topology.members() if m.name not in ended]

    def _input_state_steps(self) -> set[int]:
        """The steps after which the client receives the states of the loaders."""
        return {*self.schedule.checkpoint_steps, self._start.num_steps}

    def _results_failed(self, error: Exception) -> None:
        if self.over:
            return
        if isinstance(error, LinkLost):
            failure = node_pb2.Failure(
                kind=node_pb2.Failure.KIND_NODE, node=COORDINATOR, message=str(error), peer=error.peer
            )
        else:
            failure = internal_failure(error)
        self._on_failure(failure)

    async def _wait_for_loaded(self, members: Sequence[Member]) -> None:
        """Waits until these have loaded the plan; fails the job after the deadline."""
        if await self._waiting.until(lambda: len(self._loaded) == len(members), deadlines.ATTACHMENT.load, self):
            return
        late = [member.name for member in members if member.name not in self._loaded]
        failure = node_pb2.Failure(
            kind=node_pb2.Failure.KIND_NODE,
            node=late[0],
            message=f"{', '.join(late)} did not load the plan within {deadlines.ATTACHMENT.load:g} s",
        )
        raise self._verdict.fail(failure)

    def _load_of(self, member: Member, links: list[node_pb2.LinkSpec]) -> node_pb2.Load:
        """The Load of a member without its part of the plan."""
        topology, point = self._nodes.topology, self._point
        load = node_pb2.Load(epoch=self.number, links=links, trees=topology.trees_by_shard)
        if point is not None and member in topology.state_keepers:
            load.recovery_point = point.number
            load.copies_at.extend(other.node.address for other in topology.memoryx if other.name != member.name)
        match member.role:
            case node_pb2.ROLE_WAFER:
                load.wafer_number = member.index
            case node_pb2.ROLE_WORKER:
                load.loader = self._begin.loader
                load.done_steps = self._start.done_steps
                # With another number of workers the batches are divided differently: the loaders skip batches instead.
                num_states = 0 if point is None else len(point.input_states)
                if point is not None and self._start.done_steps and num_states == len(topology.workers):
                    load.input_states.extend(point.input_states)
                if self._begin.wants_input_states:
                    load.state_steps.extend(sorted(self._input_state_steps()))
        return load
