"""What the management service says to a job, and whom in it that concerns."""

from collections.abc import Callable, Iterator

from appliance.coordinator.execution.failures import Verdict
from appliance.coordinator.nodes.job_nodes import JobMembers
from appliance.coordinator.nodes.topology import Member
from appliance.coordinator.observation.events import Observation
from appliance.coordinator.record import JobRecord
from appliance.coordinator.recovery.recovery import Recovery
from appliance.coordinator.session import ClientSession
from waferbox import roles
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, observation_pb2


class ManagementEvents:
    """The listener of a job's link to management."""

    def __init__(
        self,
        *,
        nodes: JobMembers,
        session: ClientSession,
        recovery: Recovery,
        observation: Observation,
        verdict: Verdict,
        record: JobRecord,
        on_cancel: Callable[[], None],
        on_lost: Callable[[Member, str], None],
        on_failure: Callable[[node_pb2.Failure], None],
    ) -> None:
        """on_lost(member, reason): a node is gone. on_failure: management will not have the job."""
        self._nodes = nodes
        self._session = session
        self._recovery = recovery
        self._observation = observation
        self._verdict = verdict
        self._record = record
        self._on_lost = on_lost
        self._on_failure = on_failure
        self.cancel = on_cancel

    def trace(self, request: observation_pb2.TraceJobRequest) -> None:
        """Somebody wants a trace."""
        self._observation.trace(request)

    def history(self) -> Iterator[observation_pb2.JobEvents]:
        """What has been seen of the job until now."""
        return self._observation.history()

    def known_as(self, management: str, hello: management_pb2.CoordinatorHello) -> None:
        """What the next start of the management service at this address would be told."""
        self._record.known_as(management, hello)

    def queued(self, status: management_pb2.QueueStatus) -> None:
        """The job has another place in the queue, or waits for a node in the place of another."""
        if self._nodes.is_leased and not status.position:
            self._recovery.waits_for(status)
        else:
            self._session.tell(coordinator_pb2.SessionResponse(queue=status))

    def lease_lost(self, node: management_pb2.NodeInfo) -> None:
        """Management has lost a node."""
        member = self._nodes.member_at(node.address)
        if member is not None:
            self._on_lost(member, "the management service has lost it")

    def management_lost(self, reason: str) -> None:
        """Management will not have the job."""
        self._on_failure(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node=roles.MANAGEMENT.name, message=reason))

    def defect(self, error: Exception) -> None:
        """The link to management has ended by an exception that it did not expect."""
        self._verdict.report_defect(error)
