"""A job as its coordinator runs it: its nodes, its plans, its executions, one after the other, and its end."""

import contextlib
import logging
import threading
from collections.abc import Callable

from appliance.coordinator.compilation import Compile, CompileRefused
from appliance.coordinator.execution.client_progress import ClientProgress
from appliance.coordinator.execution.execution import CoordinatedExecution
from appliance.coordinator.execution.failures import JobFailed, SilenceWatch, Verdict, cause_of_replacement
from appliance.coordinator.execution_slot import ExecutionSlot
from appliance.coordinator.management_link import ManagementCallbacks, ManagementLink, ManagementLost
from appliance.coordinator.nodes.inputs import Inputs
from appliance.coordinator.nodes.job_nodes import JobMembers, NodesDied, NodesRefused
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
from waferbox.host.threads import GuardedThread
from waferbox.links.listener import LinkListener
from waferbox.links.socket_names import host_id
from waferbox.runtime.progress import IDLE_PARTS
from waferbox.settings import HANG_SECONDS
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, plan_pb2
from wsc.v1.plan_pb2 import EXECUTION_STRATEGY_PIPELINE as PIPELINE

logger = logging.getLogger(__name__)


class CoordinatedJob:
    """A job as its coordinator runs it, without the service. Thread-safe."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        request: management_pb2.CreateJobRequest,
        management: ManagementLink,
        listener: LinkListener,
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
            listener: accepts links.
            compile_step: the compiler.
            record: the job's record; after a take-over with the entries of earlier incarnations.
            on_over: called, from any thread, when the job has ended: close must follow.
            on_cut_off: called, from any thread, when this process must end at once, so that a successor takes over.
        """
        self._on_over = on_over
        self._on_cut_off = on_cut_off
        self.name = settings.job
        self.token = settings.token
        self._on_terminate = settings.terminated
        self.request = request
        self._management = management
        self._listener = listener
        self._changed = threading.Condition()
        self.verdict = Verdict(self._failed)
        self._record = record
        cut_off = self._client_cut_off if request.max_num_restarts and request.host_id not in ("", host_id()) else None
        self.session = ClientSession(
            self._cancelled, self.verdict.report_defect, record.session_seconds, settings.ingress, cut_off
        )
        self.plans = Plans(settings.cache, compile_step, record)
        self._reporter = JobReporter(management.report)
        self._nodes = JobMembers(
            settings.job,
            request,
            record.incarnation,
            management.acquire,
            listener,
            self._responded,
            self._node_lost,
            self.verdict.report_defect,
        )
        self.observation = Observation(management.send, self._nodes.send_all, self._advise)
        self._silence = SilenceWatch(HANG_SECONDS.get() / IDLE_PARTS)
        self._executions = ExecutionSlot(self._make_execution, self.plans, record)
        self._points = JobPoints(self._nodes, record, self.observation.pace, lambda: self._executions.current)
        self._inputs = Inputs(self._nodes, request.num_csx, record.inputs)
        self.recovery = Recovery(
            self._executions,
            self._nodes,
            self._inputs,
            self._points.points,
            self.verdict,
            RestartLimit(request.max_num_restarts, record.causes, record.point),
            FewerWafers(self._nodes, self.plans, request, management.reduce),
            replace=management.replace,
            on_restart=record.restarted,
            on_recovered=self._recovered,
        )
        self._ready = False
        self._over = False
        self._terminated = False
        self.is_finished = False  # the script has announced its end
        self._advised: set[str] = set()  # advice that is not repeated
        self._succeeded = False
        self._acquiring = GuardedThread(
            self._acquire_nodes, name="acquiring-nodes", on_defect=self.verdict.report_defect
        )

    def start(self) -> None:
        """Begins to get nodes and to receive management's messages."""
        self._management.listen(
            ManagementCallbacks(
                cancel=self.cancel,
                lease_lost=self._lease_lost,
                known_as=self._record.known_as,
                queued=self._queued,
                trace=self.observation.trace,
                history=self.observation.history,
                management_lost=self._management_lost,
                defect=self.verdict.report_defect,
            )
        )
        self._acquiring.start()
        self.session.expect()

    def tick(self) -> None:
        """Does periodic work; to be called once a second."""
        self.observation.tick()
        self._record.touch()
        if (status := self.recovery.long_wait()) is not None:
            self.session.send(coordinator_pb2.SessionResponse(queue=status))
        execution = self._executions.current
        silent = self._silence.tick(execution.reporting() if execution is not None else ())
        for name in silent[:1]:
            self._died(name, self._silence.describe(self._nodes.describe(name)))
        if self._recovers:
            self._points.tick()

    # --- calls of the client ------------------------------------------------------------------------------------------

    def client_left(self) -> None:
        """Ends the job after the end of the session."""
        self.session.end(is_finished=self.is_finished)
        with self._changed:
            self._succeeded = self._ready and self.is_finished and self.verdict.failure is None
            self._end()

    def _client_cut_off(self) -> bool:
        """Whether a successor must wait for the script, because it may be alive behind a broken connection."""
        if self._over or self.is_finished or not self._recovers:
            return False
        self._record.cut_off()
        self._on_cut_off()
        return True

    def wait_for_nodes(self) -> JobMembers:
        """Returns the nodes, once all are attached. Raises JobFailed."""
        self._wait_until(lambda: self._ready)
        return self._nodes

    def prepare_input(self, prepared: node_pb2.PrepareInput) -> None:
        """Sends the client's input to all workers. Raises JobFailed."""
        self.wait_for_nodes()
        self.recovery.wait_until_live()
        self._record.prepared(prepared)
        self._inputs.prepare(prepared)

    def shards(self, step: int) -> list[coordinator_pb2.StateShard]:
        """Returns where the state keepers are, once they have the states, or a step's snapshot. Raises JobFailed."""
        nodes = self.wait_for_nodes()
        self.recovery.wait_until_live()
        self._wait_until(lambda: not self._executions.is_awaited)
        execution = self._executions.current
        if step and execution is not None:
            execution.wait_for_snapshot(step)
        return nodes.state_shards()

    def compile(self, cirh: str, options: plan_pb2.CompileOptions) -> tuple[str, plan_pb2.Plan, bool]:
        """Returns hash, plan, and whether it came from the cache. Raises JobFailed, and as the compiler."""
        requested, leased = (each.execution_strategy == PIPELINE for each in (options, self.request))
        if requested != leased:
            raise CompileRefused("the step has another execution strategy than the job, which has the nodes for one")
        return self.plans.compile(cirh, options, self.wait_for_nodes().topology, self._reporter.compiling)

    def begin(self, begin: coordinator_pb2.Begin) -> CoordinatedExecution | None:
        """Begins an execution; None while there is another. Raises JobFailed; KeyError for an unknown artifact."""
        self.wait_for_nodes()
        self._wait_until(
            lambda: self._executions.current is None, deadlines.ATTACHMENT.left_execution
        )  # the client may have just left the previous execution
        execution = self._executions.begin(begin)
        with self._changed:
            self._changed.notify_all()
            if execution is not None:
                self._inputs.began(begin.loader)
                self._reporter.add_artifact(begin.artifact)
                if self._over:
                    execution.abandon()
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
            index=index,
            begin=begin,
            plan=lambda: self.plans[begin.artifact],
            progress=progress,
            follows_left=follows_left,
            loses_states=loses_states,
            run_ahead_steps=self.request.run_ahead_steps,
            nodes=self._nodes,
            listener=self._listener,
            verdict=self.verdict,
            points=self._points.points if self._recovers else None,
            is_interrupted=lambda: self.recovery.is_interrupted,
            next_number=self._executions.next_epoch,
            on_epoch=lambda epoch: self.observation.epoch_began(index, epoch),
            on_started=self._record.started,
            on_failure=self._report_failure,
            on_progress=lambda step: self._reporter.phase(management_pb2.JOB_PHASE_RUNNING, step, begin.num_steps),
            on_scalars=self.observation.scalars,
            on_advice=self._advise_once,
        )

    def end_execution(self, execution: CoordinatedExecution) -> None:
        """Ends an execution, so that the job can begin another; idempotent."""
        if self._executions.end(execution):
            execution.close()
            with self._changed:
                self._changed.notify_all()
            self.recovery.execution_ended()
            self.observation.ended()
            self._reporter.phase(management_pb2.JOB_PHASE_IDLE)

    # --- recovery -----------------------------------------------------------------------------------------------------

    @property
    def _recovers(self) -> bool:
        """Whether the job survives a death."""
        return self._nodes.is_leased and self.request.max_num_restarts > 0

    def _recovered(self, restart: management_pb2.Restart, message: str) -> None:
        logger.warning("%s", message)
        self._advise(message)
        self._reporter.add_restart(restart)

    # --- end of the job -----------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ends the job at a user's request."""
        self._cancelled(f"{self.name} was cancelled")

    def terminate(self) -> None:
        """Ends the job, as this process must end."""
        self._terminated = True
        lost = self._management.lost_within(deadlines.RECOVERY.deaths)
        if lost:
            self._management_lost(lost)
        self.verdict.report_end(
            node_pb2.Failure(kind=node_pb2.Failure.KIND_CANCELLED, message=f"{self.name} ended: {self._on_terminate}")
        )

    def close(self) -> None:
        """Releases all nodes and reports the job's end."""
        failure = self.verdict.failure
        self.session.close()
        self.verdict.close()
        for execution in self._executions.live():
            execution.wake()
        self.recovery.wake()
        if self._recovers:
            self._points.drop()
        late = self._nodes.close()
        if late:
            logger.warning("%s did not release %s in time", ", ".join(late), self.name)
        self.observation.flush()
        doing = "ran" if self._ready else "waited for nodes"
        self._reporter.end_with(failure, succeeded=self._succeeded, doing=doing)
        self._management.close(wait=not self._terminated)
        self._record.remove()
        self._acquiring.join()
        self.recovery.close()

    def _wait_until(self, ready: Callable[[], bool], seconds: float | None = None) -> None:
        """Waits for a condition, at most this many seconds. Raises JobFailed."""
        with self._changed:
            self._changed.wait_for(lambda: self.verdict.failure is not None or self._over or ready(), seconds)
            if self.verdict.failure is not None:
                raise JobFailed(self.verdict.failure)
            if self._over:
                message = f"{self.name} has ended"
                raise JobFailed(node_pb2.Failure(kind=node_pb2.Failure.KIND_CANCELLED, message=message))

    def _failed(self) -> None:
        """Ends the job after a verdict."""
        failure = self.verdict.failure
        assert failure is not None
        level = logging.INFO if failure.kind == node_pb2.Failure.KIND_CANCELLED else logging.ERROR
        parts = (failure.node, failure.message, failure.traceback)
        logger.log(level, "%s ends: %s", self.name, "\n".join(part for part in parts if part))
        with self._changed:
            self._end()

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self.session.close()
        self._on_over()
        self._changed.notify_all()
        self.recovery.wake()
        for execution in self._executions.live():
            execution.abandon()

    def _cancelled(self, message: str) -> None:
        self.verdict.report(node_pb2.Failure(kind=node_pb2.Failure.KIND_CANCELLED, message=message))

    def _report_failure(self, failure: node_pb2.Failure) -> None:
        with self._changed:
            if self._over:
                return
        if failure.kind == node_pb2.Failure.KIND_NODE and self._recovers:
            self.recovery.lost(failure)
        else:
            self.verdict.report(failure)

    def _died(self, name: str, message: str) -> None:
        """Handles the death of a node, or of one that is given up."""
        member = next((member for member in self._nodes.live_members() if member.name == name), None)
        if self._recovers and member is not None:
            self.recovery.died(member, message)
        else:
            self._report_failure(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node=name, message=message))

    # --- messages of management ---------------------------------------------------------------------------------------

    def _lease_lost(self, node: management_pb2.NodeInfo) -> None:
        member = self._nodes.member_at(node.address)
        if member is not None:
            self._node_lost(member, "the management service has lost it")

    def _queued(self, status: management_pb2.QueueStatus) -> None:
        if self._nodes.is_leased and not status.position:
            self.recovery.waits_for(status)  # for replacements
        else:
            self.session.send(coordinator_pb2.SessionResponse(queue=status))

    def _management_lost(self, reason: str) -> None:
        self._report_failure(
            node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node=roles.MANAGEMENT.name, message=reason)
        )

    # --- messages of nodes --------------------------------------------------------------------------------------------

    def _acquire_nodes(self) -> None:
        is_first = not self._record.incarnation
        if is_first:
            self._reporter.phase(management_pb2.JOB_PHASE_QUEUED)
        try:
            with contextlib.suppress(NodesDied):  # recovery attaches to replacements
                self._nodes.acquire(attaches=is_first)
        except (ManagementLost, TimeoutError) as error:
            self.verdict.report(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=str(error)))
        except NodesRefused as error:
            self.verdict.report(node_pb2.Failure(kind=node_pb2.Failure.KIND_USER, message=str(error)))
        else:
            if is_first:
                self._reporter.phase(management_pb2.JOB_PHASE_IDLE)
            else:
                self.recovery.take_over(self._record.cause_of_incarnation(self.name))
            with self._changed:
                self._ready = True
                self._changed.notify_all()
            self.recovery.start()
            self.session.send(coordinator_pb2.SessionResponse(ready=coordinator_pb2.JobReady()))

    def _responded(self, member: Member, response: node_pb2.AttachResponse) -> None:
        self._silence.note_message(member.name)
        if self.observation.responded(member, response) or self._points.responded(member.name, response):
            return
        if response.WhichOneof("kind") != "failed":
            for each in self._executions.live():
                each.responded(member, response)
            return
        failure, execution = response.failed, self._executions.current
        failure.node = failure.node or member.name
        if failure.is_unfit and self._recovers:
            logger.warning("%s\n%s", failure.message, failure.traceback)
            self.recovery.died(member, cause_of_replacement(failure, self._nodes.describe(member.name)))
        elif not (failure.peer and execution is not None and execution.is_epoch_over):
            self._report_failure(failure)

    def _node_lost(self, member: Member, reason: str) -> None:
        message = f"{self._nodes.describe(member.name)} died or was cut off: {reason}"
        if not self._recovers:
            lost = self._management.lost_within(deadlines.RECOVERY.deaths)  # the end of a cluster takes all nodes down
            if lost:
                message += f"; {lost}"
        if self._nodes.has(member):
            self._died(member.name, message)

    def _advise_once(self, advice: str) -> None:
        if advice not in self._advised:
            self._advised.add(advice)
            self._advise(advice)

    def _advise(self, advice: str) -> None:
        self.session.send(coordinator_pb2.SessionResponse(advice=advice))
