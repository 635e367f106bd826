"""A job as its coordinator runs it: its nodes, its plans, its executions, one after the other, and its end."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from appliance.coordinator.compilation import Compile, CompileRefused
from appliance.coordinator.driver import JobDriver, JobState
from appliance.coordinator.execution.client_progress import ClientProgress
from appliance.coordinator.execution.execution import CoordinatedExecution, ExecutionParts
from appliance.coordinator.execution.failures import (
    JobFailed,
    SilenceWatch,
    StandstillWatch,
    Verdict,
    cause_of_replacement,
    internal_failure,
)
from appliance.coordinator.execution.output_links import OutputLinks
from appliance.coordinator.execution_slot import ExecutionSlot
from appliance.coordinator.management_link import (
    ManagementCallbacks,
    ManagementLink,
    ManagementLost,
    ProcessIdentity,
)
from appliance.coordinator.nodes.inputs import Inputs
from appliance.coordinator.nodes.job_nodes import JobMembers, NodesDied, NodesRefused, OpenChannel
from appliance.coordinator.nodes.topology import Member
from appliance.coordinator.observation.events import Observation
from appliance.coordinator.plans import Plans
from appliance.coordinator.points import JobPoints
from appliance.coordinator.record import JobRecord
from appliance.coordinator.recovery.fewer_wafers import FewerWafers
from appliance.coordinator.recovery.recovery import Recovery
from appliance.coordinator.recovery.restarts import RestartLimit
from appliance.coordinator.reporting import JobReporter
from appliance.coordinator.session import ClientSession
from appliance.coordinator.settings import CoordinatorSettings
from waferbox import deadlines, roles
from waferbox.host.clock import Clock
from waferbox.host.event_loop import Changes
from waferbox.host.oom_kills import OomWatch
from waferbox.runtime.progress import IDLE_PARTS
from waferbox.settings import HANG_SECONDS
from waferbox.text import on_one_line
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, observation_pb2, plan_pb2, record_pb2
from wsc.v1.plan_pb2 import EXECUTION_STRATEGY_PIPELINE as PIPELINE

logger = logging.getLogger(__name__)

MOST_ERROR_CHARACTERS = 1000  # of the exception that ends a script

PREEMPTED = (
    "Other jobs waited while this one was idle: its nodes work for them. Its states are kept, and it takes nodes again "
    "when it needs some. WAFERBOX_IDLE_SECONDS of the cluster is the time after which this happens"
)


OUT_OF_MEMORY = (
    "the kernel's out-of-memory killer has just killed a process of this host, probably this one. Keep the states on a "
    "disk (`waferbox up --state-dir`), make the model or the batch smaller, or start fewer processes"
)


class JobHost(Protocol):
    """What a job uses of its coordinator's process and host, which a simulation replaces.

    Attributes:
        identity: of the process.
        clock: of the host.
        links: on which the coordinator receives outputs.
        open_channel: opens a channel to an address.
    """

    identity: ProcessIdentity
    clock: Clock
    links: OutputLinks
    open_channel: OpenChannel

    def process_report(self, node: str) -> observation_pb2.NodeReport:
        """Returns a report with the figures of the process. node: the name in it."""

    async def is_listening(self, address: str) -> bool:
        """Whether a process of this host accepts connections at an address."""

    def oom_kills(self) -> int:
        """Returns how many processes of this host the kernel has killed for want of memory."""

    def is_running(self, process_id: int, process_started: int) -> bool:
        """Whether a process of this host runs; process_started: as of `waferbox.launch.spawn.process_started`."""


class CoordinatedJob:
    """A job as its coordinator runs it, without the service. All of its state belongs to one event loop."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        request: management_pb2.CreateJobRequest,
        management: ManagementLink,
        host: JobHost,
        compile_step: Compile,
        record: JobRecord,
        on_over: Callable[[], None],
        on_cut_off: Callable[[], None],
    ) -> None:
        """Makes the parts of the job; start begins to get nodes.

        Args:
            settings: of the coordinator.
            request: of the client.
            management: the link to management.
            host: of the coordinator.
            compile_step: the compiler.
            record: the job's record; after a take-over with the entries of earlier incarnations.
            on_over: called when the job has ended: close must follow.
            on_cut_off: called when this process must end at once, so that a successor takes over.
        """
        self._on_over = on_over
        self._on_cut_off = on_cut_off
        self.name = settings.job
        self.token = settings.token
        self._on_terminate = settings.terminated
        self.request = request
        self._management = management
        self._changes = Changes()
        self.verdict = Verdict(self._failed)
        self._record = record
        self._host = host
        cut_off = self._client_cut_off if request.max_num_restarts else None
        is_up = (lambda: host.is_listening(settings.ingress)) if settings.ingress else None
        self.session = ClientSession(self._script_is_missing, record.session_seconds, is_up, cut_off)
        self.plans = Plans(settings.cache, compile_step, record)
        self._reporter = JobReporter(management.report)
        self._nodes = JobMembers(
            settings.job,
            request,
            record.incarnation,
            record,
            management.acquire,
            host.open_channel,
            self._responded,
            self._node_lost,
            self.verdict.report_defect,
        )
        self.observation = Observation(
            management.send, self._nodes.send_all, self._send_advice, host.clock, host.process_report
        )
        self._silence = SilenceWatch(HANG_SECONDS.get() / IDLE_PARTS)
        self._standstill = StandstillWatch(HANG_SECONDS.get())
        self._oom_watch = OomWatch(host.oom_kills)
        self._executions = ExecutionSlot(self._make_execution, record)
        self._points = JobPoints(
            self._nodes, record, self.observation.pace, lambda: self._executions.current, host.clock
        )
        self._parts = ExecutionParts(
            owner=self,
            nodes=self._nodes,
            links=host.links,
            verdict=self.verdict,
            changes=self._changes,
            points=self._points.points if request.max_num_restarts else None,
            clock=host.clock,
            run_ahead_steps=request.run_ahead_steps,
        )
        self._inputs = Inputs(self._nodes, request.num_csx, record.inputs)
        self._recovery = Recovery(
            self._executions,
            self._nodes,
            self._inputs,
            self._points.points,
            self.verdict,
            self._changes,
            host.clock,
            RestartLimit(request.max_num_restarts, record.causes, record.point, record.restarted, host.clock),
            FewerWafers(self._nodes, self.plans, request, management.reduce),
            replace=management.replace,
            on_recovered=self._recovered,
        )
        self._driver = JobDriver(self, self._recovery, self.verdict, self._changes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_waiting = 0  # calls of the client that wait for nodes
        self._over = False
        self._terminated = False
        self.is_finished = False  # the script has announced its end
        self._is_cancelled = False
        self._script_error = ""
        self._input_failure: node_pb2.Failure | None = None  # of an execution that has not ended
        self._compile_failure: node_pb2.Failure | None = None  # after which the script has begun nothing
        self._succeeded = False

    def start(self) -> None:
        """Begins to get nodes and to receive management's messages."""
        self._management.listen(
            ManagementCallbacks(
                cancel=self.cancel,
                lease_lost=self._lease_lost,
                known_as=self._record.known_as,
                queued=self._queued,
                preempt=self._preempt,
                trace=self.observation.trace,
                history=self.observation.history,
                management_lost=self._management_lost,
                defect=self.verdict.report_defect,
            )
        )
        self.begin_task(self._driver.run())
        self.session.expect()

    def tick(self) -> None:
        """Does periodic work; to be called once a second."""
        self._watch_script()
        self.observation.tick()
        self._oom_watch.tick()
        self._record.touch()
        self.session.send_progress(self.plans.progress)
        if (status := self._recovery.long_wait()) is not None:
            self.session.send(coordinator_pb2.SessionResponse(queue=status))
        execution = self.execution
        running = [] if execution is None else execution.reporting()
        silent = self._silence.tick(running)
        for name in silent[:1]:
            self.died(name, self._silence.describe(self._nodes.describe(name)))
        is_client_behind = execution is not None and execution.is_client_behind
        if message := self._standstill.tick(running, is_client_behind=is_client_behind):
            self.link_failed(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=message))
        if self.recovers:
            self._points.tick()

    def begin_task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Begins a task of the job, which close cancels. An unexpected exception in it ends the job."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            logger.error("a defect in the work for %s", self.name, exc_info=error)
            self.verdict.report_defect(error)

    def end_as(self, end: record_pb2.RecordedEnd) -> None:
        """Ends the job as an earlier coordinator was about to. Its recovery points may be removed."""
        self._succeeded = end.succeeded
        if end.HasField("failure"):
            self.verdict.report(end.failure)
        else:
            self._end()

    # --- calls of the client ------------------------------------------------------------------------------------------

    def client_left(self) -> None:
        """Ends the job after the end of the session, unless a successor waits for the client."""
        self.begin_task(self._leave())

    def finish(self, *, is_cancelled: bool, error: str) -> None:
        """Notes that the script no longer needs the job. is_cancelled and error: see FinishRequest."""
        self.is_finished = True
        self._is_cancelled = is_cancelled
        self._script_error = error

    async def _leave(self) -> None:
        await self.session.end(is_finished=self.is_finished)
        has_nodes = self._driver.state is not JobState.QUEUED
        is_done = self.is_finished and not self._is_cancelled
        self._succeeded = has_nodes and is_done and self.verdict.failure is None
        self._report_input_failure()
        if self._compile_failure is not None:
            self.verdict.report(self._compile_failure)
        if self._script_error:
            self._script_failed(self._script_error)
        self._end()

    def client_left_execution(self, execution: CoordinatedExecution) -> None:
        """Abandons an execution after the end of the client's call, unless a successor waits for the client."""

        async def abandon() -> None:
            await self.session.check_connection()
            execution.abandon()

        if self.execution is execution:
            self.begin_task(abandon())

    def _client_cut_off(self) -> bool:
        """Whether a successor must wait for the script, because it may be alive behind a broken connection."""
        if self._over or self.is_finished or not self._may_script_run():
            return False
        self._record.cut_off()
        self._on_cut_off()
        return True

    def _may_script_run(self) -> bool:
        """Whether the script may be alive, although its connection broke."""
        # A script on another host cannot be distinguished from a broken connection.
        return not self._is_script_here or self._does_script_run()

    def _does_script_run(self) -> bool:
        """Whether the process of the script is found on this host."""
        request = self.request
        is_known = bool(request.process_id) and self._is_script_here
        return is_known and self._host.is_running(request.process_id, request.process_started)

    @property
    def _is_script_here(self) -> bool:
        return self.request.host_id in ("", self._host.identity.host)

    def _watch_script(self) -> None:
        """Ends the job if its script has ended without a session: it was killed while there was no coordinator."""
        record = self._record
        if self.session.is_open:
            if not record.is_script_seen and self._does_script_run():
                record.saw_script()
        elif not self._over and (record.is_script_seen or record.was_cut_off) and not self._may_script_run():
            self._cancelled(f"the script (pid {self.request.process_id}) has ended")

    def _script_is_missing(self) -> None:
        if self._management.is_briefly_away:
            self.session.expect()  # the script gets this coordinator's address from management
            return
        did = "come back" if self._record.was_cut_off else "open a session"
        self._cancelled(f"the client did not {did} within {self._record.session_seconds:g} s")

    async def wait_for_nodes(self) -> JobMembers:
        """Returns the nodes, once all are attached. Raises JobFailed."""
        await self._wait_until(lambda: self._driver.state is not JobState.QUEUED)
        return self._nodes

    async def prepare_input(self, prepared: node_pb2.PrepareInput) -> None:
        """Sends the client's input to all workers. Raises JobFailed."""
        await self._record.prepared(prepared)
        await self._wait_for_states()
        self._inputs.prepare(prepared)

    async def shards(self, step: int) -> list[coordinator_pb2.StateShard]:
        """Returns where the state keepers are, once they have the states, or a step's snapshot. Raises JobFailed."""
        await self._wait_for_states(lambda: not self._executions.is_awaited)
        if step and self.execution is not None:
            await self.execution.wait_for_snapshot(step)
        return self._nodes.state_shards()

    async def _wait_for_states(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Waits until the job has all its nodes, with states, and for a condition. Raises JobFailed."""
        self._num_waiting += 1
        self._changes.notify()
        try:
            await self._wait_until(lambda: self._driver.is_live and ready())
        finally:
            self._num_waiting -= 1

    async def compile(self, cirh: str, options: plan_pb2.CompileOptions) -> tuple[str, plan_pb2.Plan, bool]:
        """Returns hash, plan, and whether it came from the cache. Raises JobFailed, and as the compiler."""
        requested, leased = (each.execution_strategy == PIPELINE for each in (options, self.request))
        if requested != leased:
            raise CompileRefused("the step has another execution strategy than the job, which has the nodes for one")
        topology = (await self.wait_for_nodes()).topology
        compiling = asyncio.create_task(self.plans.compile(cirh, options, topology, self._reporter.compiling))
        compiling.add_done_callback(lambda _: self._changes.notify())
        try:
            await self._wait_until(compiling.done)  # the job may end meanwhile
        finally:
            compiling.cancel()
        self._compile_failure = None
        try:
            return compiling.result()
        except CompileRefused as error:
            self._compile_failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_USER, message=str(error))
            raise
        except Exception as error:
            self._compile_failure = internal_failure(error)
            raise

    async def begin(self, begin: coordinator_pb2.Begin) -> CoordinatedExecution | None:
        """Begins an execution of a compiled step; None while there is another. Raises JobFailed."""
        # The client may have just left the previous execution.
        await self._wait_until(lambda: self.execution is None, deadlines.ATTACHMENT.left_execution)
        execution = self._executions.begin(begin)
        if execution is not None:
            self._compile_failure = None
            self._inputs.began(begin.loader)
            self._reporter.add_artifact(begin.artifact)
            self._changes.notify()
        return execution

    def _make_execution(
        self,
        index: int,
        begin: coordinator_pb2.Begin,
        progress: ClientProgress,
        *,
        follows_left: bool,
        loses_states: bool,
    ) -> CoordinatedExecution:
        return CoordinatedExecution(
            self._parts, index, begin, progress, follows_left=follows_left, loses_states=loses_states
        )

    # --- calls of the driver ------------------------------------------------------------------------------------------

    @property
    def recovers(self) -> bool:
        """Whether the job survives a death."""
        return self._nodes.is_leased and self.request.max_num_restarts > 0

    @property
    def execution(self) -> CoordinatedExecution | None:
        """The current execution."""
        return self._executions.current

    @property
    def needs_nodes(self) -> bool:
        """Whether an execution or a call of the client waits for nodes."""
        return self.execution is not None or self._num_waiting > 0

    async def give_back_nodes(self) -> None:
        """Gives all nodes back. Raises NodesRefused."""
        self._record.preempted(await self._nodes.give_back())
        await self._management.reduce(())
        logger.info("%s was idle, and has given its nodes back", self.name)
        self._send_advice(PREEMPTED)

    async def get_nodes(self) -> None:
        """Gets the nodes of the job, and attaches to them unless recovery does. Raises JobFailed."""
        was_preempted = self._nodes.is_leased
        is_first = not self._record.incarnation and not was_preempted
        if is_first or was_preempted:
            self._reporter.phase(management_pb2.JOB_PHASE_QUEUED)
        try:
            with contextlib.suppress(NodesDied):  # recovery attaches to replacements
                await self._nodes.acquire(attaches=is_first)
        except (ManagementLost, TimeoutError) as error:
            failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=str(error))
            raise self.verdict.fail(failure) from error
        except NodesRefused as error:
            failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_USER, message=str(error))
            raise self.verdict.fail(failure) from error
        self._record.preempted(())
        if is_first or was_preempted:
            self._reporter.phase(management_pb2.JOB_PHASE_IDLE)
        if was_preempted:
            self._recovery.preempted()
        elif not is_first:
            self._recovery.take_over(self._record.cause_of_incarnation(self.name))
        self.session.send(coordinator_pb2.SessionResponse(ready=coordinator_pb2.JobReady()))

    def end_execution(self, execution: CoordinatedExecution) -> None:
        """Notes that an execution has ended on all nodes, so that the job can begin another."""
        self._executions.end(execution)
        if execution.is_abandoned_by_client:
            self._note_step(execution)
        else:
            self._input_failure = None
        self.observation.ended()
        self._reporter.phase(management_pb2.JOB_PHASE_IDLE)

    def _note_step(self, execution: CoordinatedExecution) -> None:
        """Makes the step that the script has reached that of the next report."""
        if execution.consumed_step:
            self._reporter.reached(execution.consumed_step, execution.num_asked_steps)

    def died(self, name: str, message: str) -> None:
        """Handles the death of a node, or of one that is given up."""
        member = next((member for member in self._nodes.live_members() if member.name == name), None)
        if self.recovers and member is not None:
            self._recovery.died(member, message)
        else:
            self.link_failed(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node=name, message=message))

    def _recovered(self, restart: management_pb2.Restart, message: str) -> None:
        logger.warning("%s", message)
        self._send_advice(message)
        self._reporter.add_restart(restart)

    # --- calls of executions ------------------------------------------------------------------------------------------

    @property
    def is_interrupted(self) -> bool:
        """Whether a node or a link is missing now."""
        return self._recovery.is_interrupted

    def plan(self, artifact: str) -> plan_pb2.Plan:
        """Returns the plan of a compiled step for the present number of wafers."""
        return self.plans[artifact]

    def next_epoch(self) -> int:
        """Returns the number of a new epoch."""
        return self._executions.next_epoch()

    def epoch_began(self, execution: int, epoch: int) -> None:
        """Notes an epoch whose steps will run."""
        self.observation.epoch_began(execution, epoch)

    def started(self, execution: int) -> None:
        """Notes that nothing that the client has sent for an execution can be lost any more."""
        self._record.started(execution)

    def link_failed(self, failure: node_pb2.Failure) -> None:
        """Handles a failure: a lost link, or a death in a job that recovers, interrupts the job. All else ends it."""
        if self._over:
            return
        if failure.kind == node_pb2.Failure.KIND_NODE and (self.recovers or failure.peer):
            self._recovery.lost(failure)
        else:
            self.verdict.report(self._recovery.ended_by(failure))

    def input_failed(self, failure: node_pb2.Failure) -> None:
        """Notes that a step has no input, which the script may survive."""
        logger.warning("step %d has no input: %s", failure.step, failure.message)
        self._input_failure = failure

    def progressed(self, step: int, num_steps: int) -> None:
        """Reports the progress of the execution."""
        self._reporter.phase(management_pb2.JOB_PHASE_RUNNING, step, num_steps)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds sampled outputs to the observations."""
        self.observation.scalars(step, values)

    def found(self, finding: str) -> None:
        """Sends what the script does otherwise than it says to the client, which shows it once."""
        self.session.send(coordinator_pb2.SessionResponse(finding=finding))

    def _send_advice(self, advice: str) -> None:
        self.session.send(coordinator_pb2.SessionResponse(advice=advice))

    # --- end of the job -----------------------------------------------------------------------------------------------

    def cancel(self, notice: management_pb2.CancelNotice) -> None:
        """Ends the job at management's request."""
        self._report_input_failure()
        if notice.is_error:
            self._script_failed(notice.cause)
        else:
            self._cancelled(f"{self.name} ended: {notice.cause}" if notice.cause else f"{self.name} was cancelled")

    def _script_failed(self, error: str) -> None:
        """Ends the job with the exception that ends its script."""
        message = f"its script failed: {on_one_line(error)[:MOST_ERROR_CHARACTERS]}"
        self.verdict.report(node_pb2.Failure(kind=node_pb2.Failure.KIND_USER, message=message))

    def _report_input_failure(self) -> None:
        """Makes a step without input the reason for the end, unless the script has caught the error."""
        if self._input_failure is not None:
            self.verdict.report(self._input_failure)

    def terminate(self) -> None:
        """Ends the job, as this process must end."""
        self._terminated = True
        self._cancelled(f"{self.name} ended: {self._on_terminate}")

    async def close(self) -> None:
        """Releases all nodes and reports the job's end."""
        failure = self.verdict.failure
        had_nodes = self._driver.state is not JobState.QUEUED or bool(self._record.incarnation)
        self.session.close()
        self.verdict.close()
        self._changes.notify()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._record.ending(failure, succeeded=self._succeeded)
        if self.recovers:
            self._points.drop()
        late = await self._nodes.close()
        if late:
            logger.warning("%s did not release %s in time", ", ".join(late), self.name)
        for execution in self._executions.live():
            self._note_step(execution)
            await execution.close()
        self.observation.flush()
        self._reporter.end_with(failure, succeeded=self._succeeded, doing="ran" if had_nodes else "waited for nodes")
        await self._management.close(wait=not self._terminated)
        self._record.remove()

    async def _wait_until(self, ready: Callable[[], bool], seconds: float | None = None) -> None:
        """Waits for a condition, at most this many seconds. Raises JobFailed."""

        def checked() -> bool:
            if self.verdict.failure is not None:
                raise JobFailed(self.verdict.failure)
            if self._over:
                message = f"{self.name} has ended"
                raise JobFailed(node_pb2.Failure(kind=node_pb2.Failure.KIND_CANCELLED, message=message))
            return ready()

        await self._changes.until(checked, seconds)

    def _failed(self) -> None:
        """Ends the job after a verdict."""
        failure = self.verdict.failure
        assert failure is not None
        level = logging.INFO if failure.kind == node_pb2.Failure.KIND_CANCELLED else logging.ERROR
        parts = (failure.node, failure.message, failure.traceback)
        logger.log(level, "%s ends: %s", self.name, "\n".join(part for part in parts if part))
        self._end()

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self.session.close()
        for execution in self._executions.live():
            execution.abandon()
        self._changes.notify()
        self._on_over()

    def _cancelled(self, message: str) -> None:
        self.verdict.report(node_pb2.Failure(kind=node_pb2.Failure.KIND_CANCELLED, message=message))

    # --- messages of management ---------------------------------------------------------------------------------------

    def _lease_lost(self, node: management_pb2.NodeInfo) -> None:
        member = self._nodes.member_at(node.address)
        if member is not None:
            self._node_lost(member, "the management service has lost it")

    def _queued(self, status: management_pb2.QueueStatus) -> None:
        if not self._driver.waits_for_nodes and not status.position:
            self._recovery.waits_for(status)  # for replacements
        else:
            self.session.send(coordinator_pb2.SessionResponse(queue=status))

    def _preempt(self) -> None:
        """Gives the nodes back, if the job is idle and a recovery point has its states."""
        is_idle = self._driver.state is JobState.IDLE and self._driver.is_live and not self.needs_nodes
        if is_idle and self.recovers and self._executions.can_be_restored(self._points.points.complete):
            self._driver.preempt()

    def _management_lost(self, reason: str) -> None:
        self.link_failed(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node=roles.MANAGEMENT.name, message=reason))

    # --- messages of nodes --------------------------------------------------------------------------------------------

    def _responded(self, member: Member, response: node_pb2.AttachResponse) -> None:
        self._silence.note_message(member.name)
        for event in response.events.events:
            if event.HasField("report"):
                self._standstill.note_report(member.name, event.report)
        if self.observation.responded(member, response) or self._points.responded(member.name, response):
            return
        if response.WhichOneof("kind") != "failed":
            for each in self._executions.live():
                each.responded(member, response)
            return
        failure, execution = response.failed, self.execution
        failure.node = failure.node or member.name
        if execution is not None and execution.input_failed(failure):
            return
        if failure.is_unfit and self.recovers:
            logger.warning("%s\n%s", failure.message, failure.traceback)
            self._recovery.died(member, cause_of_replacement(failure, self._nodes.describe(member.name)))
        elif not (failure.peer and execution is not None and execution.is_epoch_over):
            self.link_failed(failure)

    def _node_lost(self, member: Member, reason: str) -> None:
        if self._nodes.has(member):
            if member.node.host == self._host.identity.host and self._oom_watch.has_killed():
                reason = f"{reason}; {OUT_OF_MEMORY}"
            self.died(member.name, f"{self._nodes.describe(member.name)} died or was cut off: {reason}")
