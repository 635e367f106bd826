"""Management's messages to a job, dispatched to the parts of the job."""

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
    """The listener of a job's link to management: forwards each message to the part of the job that handles it."""

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
        """on_lost(member, reason): called for a lost node. on_failure: called when management refuses the job."""
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
        """Starts a trace."""
        self._observation.trace(request)

    def history(self) -> Iterator[observation_pb2.JobEvents]:
        """Returns the observations of the job so far."""
        return self._observation.history()

    def known_as(self, management: str, hello: management_pb2.CoordinatorHello) -> None:
        """Records the hello for a restarted management service at this address."""
        self._record.known_as(management, hello)

    def queued(self, status: management_pb2.QueueStatus) -> None:
        """Handles a change of the job's position in the queue, or of the nodes that it lacks."""
        if self._nodes.is_leased and not status.position:
            self._recovery.waits_for(status)
        else:
            self._session.send(coordinator_pb2.SessionResponse(queue=status))

    def lease_lost(self, node: management_pb2.NodeInfo) -> None:
        """Handles the loss of a leased node."""
        member = self._nodes.member_at(node.address)
        if member is not None:
            self._on_lost(member, "the management service has lost it")

    def management_lost(self, reason: str) -> None:
        """Fails the job, as management refuses it."""
        self._on_failure(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node=roles.MANAGEMENT.name, message=reason))

    def defect(self, error: Exception) -> None:
        """Handles an unexpected exception in the link's thread."""
        self._verdict.report_defect(error)
