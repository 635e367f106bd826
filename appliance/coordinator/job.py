"""A job: the client's session, its artifacts, its nodes, its executions, and how it ends."""

import hashlib
import logging
import queue
import threading
import traceback
from collections.abc import Callable, Iterator

from appliance.coordinator.compilation import Compile, report_of
from appliance.coordinator.execution.execution import Execution
from appliance.coordinator.failures.verdict import JobFailed, Verdict
from appliance.coordinator.management_link import ManagementLink, ManagementLost
from appliance.coordinator.nodes.job_nodes import Crew, NodesRefused
from appliance.coordinator.nodes.topology import Member
from appliance.coordinator.observation.events import Observation
from appliance.coordinator.settings import CoordinatorSettings
from interconnect.links.listener import LinkListener
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, observation_pb2, plan_pb2

logger = logging.getLogger(__name__)

SESSION_SECONDS = 10.0  # until the client must have come
MAX_ARTIFACTS = 4  # of its executions, that are told of
DEATHS_SECONDS = 0.2  # within which the deaths of a node and of management are one event


class Job:
    """Everything about one job but the service. Thread-safe."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        request: management_pb2.CreateJobRequest,
        management: ManagementLink,
        listener: LinkListener,
        compile_step: Compile,
        on_over: Callable[[], None],
    ) -> None:
        """on_over() is called, from any thread, when the job has come to an end: close it."""
        self._on_over = on_over
        self.name = settings.job
        self.token = settings.token
        self._cache = settings.cache
        self._on_terminate = settings.terminated
        self.request = request
        self._management = management
        self._listener = listener
        self._compile = compile_step
        self._changed = threading.Condition()
        self.verdict = Verdict(self._failed)
        self._crew = Crew(settings.job, request, management, listener, self._responded, self._node_lost)
        self.observation = Observation(management.tell, self._crew.send_all, self._advise)
        self._ready = False
        self._plans: dict[str, plan_pb2.Plan] = {}
        self._artifacts: dict[bytes, str] = {}  # by what was asked for
        self._placed: dict[str, int] = {}  # shard of each state that has a place, which it keeps
        self._compiling = threading.Lock()
        self._execution: Execution | None = None
        self._executions = 0
        self._session = False
        self._news: queue.SimpleQueue[coordinator_pb2.SessionResponse | None] = queue.SimpleQueue()
        self._over = False
        self._terminated = False
        self._succeeded = False
        self._report = management_pb2.JobReport(phase=management_pb2.JOB_PHASE_STARTING)
        self._recruiter = threading.Thread(target=self._recruit, name="recruiting", daemon=True)
        self._patience = threading.Timer(SESSION_SECONDS, self._never_came)
        self._patience.daemon = True

    def start(self) -> None:
        """Begin to get nodes, and to listen to management."""
        self._management.listen(self)
        self._recruiter.start()
        self._patience.start()

    # --- the client's session -----------------------------------------------------------------------------------------

    def open_session(self) -> bool:
        """The client is here; False if it was before."""
        self._patience.cancel()
        with self._changed:
            if self._session:
                return False
            self._session = True
        return True

    def client_left(self) -> None:
        """The session's stream has ended: so has the job."""
        with self._changed:
            self._succeeded = self._ready and self._execution is None and self.verdict.failure is None
            self._end()

    def cancel(self) -> None:
        """Somebody has cancelled the job."""
        self.verdict.report(
            node_pb2.Failure(kind=node_pb2.Failure.KIND_CANCELLED, message=f"{self.name} was cancelled")
        )

    def terminate(self) -> None:
        """This process is told to end."""
        self._terminated = True
        lost = self._management.lost_within(DEATHS_SECONDS)
        if lost:
            self._report_failure(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node="management", message=lost))
        self.verdict.report_end(
            node_pb2.Failure(kind=node_pb2.Failure.KIND_CANCELLED, message=f"{self.name} ended: {self._on_terminate}")
        )

    def news(self) -> Iterator[coordinator_pb2.SessionResponse]:
        """What the client is to know, as it comes, until there is a verdict, or the client has left."""
        yield from iter(self._news.get, None)

    # --- what the client asks for -------------------------------------------------------------------------------------

    def wait_for_crew(self) -> Crew:
        """The crew, once all nodes are attached. Raises JobFailed."""
        with self._changed:
            while not self._ready:
                self._raise_if_over()
                self._changed.wait()
            self._raise_if_over()
        return self._crew

    def prepare_input(self, prepared: node_pb2.PrepareInput) -> None:
        """Hand the client's input to all workers. Raises JobFailed."""
        crew = self.wait_for_crew()
        topology = crew.topology

        def command(worker: Member) -> node_pb2.AttachRequest:
            wafer, number = divmod(worker.index, topology.num_workers_per_wafer)
            own = node_pb2.PrepareInput()
            own.CopyFrom(prepared)
            own.worker, own.num_workers = number, topology.num_workers_per_wafer
            own.wafer, own.num_csx = wafer, len(topology.wafers)
            return node_pb2.AttachRequest(prepare_input=own)

        crew.send(topology.workers, command)

    def shards(self) -> list[coordinator_pb2.StateShard]:
        """Where MemoryX is reached. Raises JobFailed."""
        return self.wait_for_crew().state_shards()

    def compile(self, cirh: str, options: plan_pb2.CompileOptions) -> tuple[str, plan_pb2.Plan, bool]:
        """Hash, plan, and whether it came from the cache. Raises JobFailed; what the compiler raises."""
        topology = self.wait_for_crew().topology
        asked = hashlib.sha256(options.SerializeToString(deterministic=True) + b"\n" + cirh.encode()).digest()
        with self._compiling:
            # The cache's key says which states have a place: now those of this very step do, where its plan put them.
            if (known := self._artifacts.get(asked)) is not None:
                return known, self._plans[known], True
            self._tell(management_pb2.JOB_PHASE_COMPILING)
            try:
                artifact, plan, cached = self._compile(
                    cirh, len(topology.wafers), len(topology.memoryx), dict(self._placed), options
                )
            finally:
                self._tell(management_pb2.JOB_PHASE_IDLE)
            self._artifacts[asked] = artifact
            logger.info("step %s is %s", artifact, "in the cache" if cached else "compiled")
            self._plans[artifact] = plan
            for shard in plan.memoryx:
                for slot in shard.states:
                    if not slot.replicated:
                        self._placed[slot.name] = shard.shard
        return artifact, plan, cached

    def report(self, artifact: str) -> str:
        """The file of an artifact's report; empty where there is none."""
        return report_of(self._cache, artifact)

    def begin(self, begin: coordinator_pb2.Begin) -> Execution | None:
        """A new execution, or None while there is another. Raises JobFailed; KeyError for an unknown artifact."""
        crew = self.wait_for_crew()
        with self._changed:
            if self._execution is not None:
                return None
            self._executions += 1
            self._execution = Execution(
                job=self.name,
                number=self._executions,
                begin=begin,
                plan=self._plans[begin.artifact],
                run_ahead_steps=self.request.run_ahead_steps,
                crew=crew,
                listener=self._listener,
                verdict=self.verdict,
                on_progress=lambda step: self._tell(management_pb2.JOB_PHASE_RUNNING, step, begin.num_steps),
                on_scalars=self.observation.scalars,
            )
            others = [artifact for artifact in self._report.artifacts if artifact != begin.artifact]
            del self._report.artifacts[:]
            self._report.artifacts.extend([*others[1 - MAX_ARTIFACTS :], begin.artifact])
            self.observation.began(self._executions)
            return self._execution

    def end_execution(self, execution: Execution) -> None:
        """The execution is over; the job can take another one. To be called once or more."""
        with self._changed:
            if self._execution is not execution:
                return
            self._execution = None
        execution.close()
        self.observation.ended()
        self._tell(management_pb2.JOB_PHASE_IDLE)

    # --- how it ends --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let all nodes go; report how the job ended."""
        self._patience.cancel()
        failure = self.verdict.failure
        self.verdict.close()
        with self._changed:
            execution = self._execution
        if execution is not None:
            execution.wake()
        late = self._crew.close()
        if late:
            logger.warning("%s had not dropped %s in time", ", ".join(late), self.name)
        if failure is None and self._succeeded:
            phase, message = management_pb2.JOB_PHASE_SUCCEEDED, ""
        elif failure is None:
            phase, message = (
                management_pb2.JOB_PHASE_CANCELLED,
                f"the client left while it {'ran' if self._ready else 'waited for nodes'}",
            )
        elif failure.kind == node_pb2.Failure.KIND_CANCELLED:
            phase, message = management_pb2.JOB_PHASE_CANCELLED, failure.message
        else:
            phase, message = management_pb2.JOB_PHASE_FAILED, failure.message
        self.observation.flush()
        self._report.phase, self._report.message = phase, message
        self._management.report(self._report)
        self._management.close(wait=not self._terminated)
        self._recruiter.join()

    def _raise_if_over(self) -> None:
        if self.verdict.failure is not None:
            raise JobFailed(self.verdict.failure)
        if self._over:
            raise JobFailed(node_pb2.Failure(kind=node_pb2.Failure.KIND_CANCELLED, message=f"{self.name} has ended"))

    def _failed(self) -> None:
        """There is a verdict."""
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
        self._news.put(None)
        self._on_over()
        self._changed.notify_all()
        if self._execution is not None:
            self._execution.abandon()

    def _never_came(self) -> None:
        self.verdict.report(
            node_pb2.Failure(
                kind=node_pb2.Failure.KIND_CANCELLED, message=f"the client did not come within {SESSION_SECONDS:g} s"
            )
        )

    # --- what nodes and management say --------------------------------------------------------------------------------

    def _recruit(self) -> None:
        self._tell(management_pb2.JOB_PHASE_QUEUED)
        try:
            self._crew.recruit()
        except NodesRefused as error:
            self.verdict.report(node_pb2.Failure(kind=node_pb2.Failure.KIND_USER, message=str(error)))
        except (ManagementLost, TimeoutError) as error:
            self.verdict.report(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=str(error)))
        except Exception as error:  # noqa: BLE001 - a defect must end the job, not only this thread
            self.verdict.report(internal_failure(error))
        else:
            self._tell(management_pb2.JOB_PHASE_IDLE)
            with self._changed:
                self._ready = True
                self._changed.notify_all()
            self._news.put(coordinator_pb2.SessionResponse(ready=coordinator_pb2.JobReady()))

    def trace(self, request: observation_pb2.TraceJobRequest) -> None:
        """Somebody wants a trace."""
        self.observation.trace(request)

    def history(self) -> Iterator[observation_pb2.JobEvents]:
        """What has been seen of the job until now."""
        return self.observation.history()

    def _responded(self, member: Member, response: node_pb2.AttachResponse) -> None:
        if self.observation.responded(member, response):
            return
        with self._changed:
            execution = self._execution
        if response.WhichOneof("kind") != "failed":
            if execution is not None:
                execution.responded(member, response)
            return
        failure = response.failed
        failure.node = failure.node or member.name
        if not (failure.peer and execution is not None and execution.stopping):
            self._report_failure(failure)

    def _node_lost(self, member: Member, reason: str) -> None:
        who = f"{member.name} (pid {member.node.process_id} at {member.node.address})"
        message = f"{who} died or was cut off: {reason}"
        lost = self._management.lost_within(DEATHS_SECONDS)  # all go when a cluster does
        if lost:
            message += f"; {lost}"
        self._report_failure(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node=member.name, message=message))

    def queued(self, status: management_pb2.QueueStatus) -> None:
        """The job has another place in the queue."""
        self._news.put(coordinator_pb2.SessionResponse(queue=status))

    def _advise(self, advice: str) -> None:
        self._news.put(coordinator_pb2.SessionResponse(advice=advice))

    def lease_lost(self, node: management_pb2.NodeInfo) -> None:
        """Management has lost a node."""
        member = self._crew.member_at(node.address)
        if member is not None:
            self._node_lost(member, "the management service has lost it")

    def management_lost(self, reason: str) -> None:
        """Management will not have the job."""
        self._report_failure(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node="management", message=reason))

    def _report_failure(self, failure: node_pb2.Failure) -> None:
        with self._changed:
            if self._over:
                return
        self.verdict.report(failure)

    def _tell(self, phase: "management_pb2.JobPhase.ValueType", step: int = 0, num_steps: int = 0) -> None:
        with self._changed:
            self._report.phase = phase
            if num_steps:
                self._report.step, self._report.num_steps = step, num_steps
            report = management_pb2.JobReport()
            report.CopyFrom(self._report)
        self._management.report(report)


def internal_failure(error: Exception) -> node_pb2.Failure:
    """The failure for a defect in the coordinator."""
    return node_pb2.Failure(
        kind=node_pb2.Failure.KIND_INTERNAL,
        node="coordinator",
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


def placements(plan: plan_pb2.Plan) -> list[coordinator_pb2.StatePlacement]:
    """Where the states of a plan live; a state that every shard keeps is named once for each."""
    return [
        coordinator_pb2.StatePlacement(name=slot.name, type=slot.type, shard=shard.shard)
        for shard in plan.memoryx
        for slot in shard.states
    ]
