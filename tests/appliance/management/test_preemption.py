"""Which idle jobs are preempted, and what management knows of them."""

import asyncio
from collections.abc import Sequence

from appliance.management.coordination import Coordination
from appliance.management.jobs import JobTable
from appliance.management.nodes.job_queue import Waiting
from appliance.management.nodes.registry import NodeRegistry
from waferbox import roles
from waferbox.host.clock import SystemClock
from wsc.v1 import management_pb2, node_pb2

SHAPE = (node_pb2.ROLE_WAFER, node_pb2.ROLE_WORKER, node_pb2.ROLE_MEMORYX)


class Jobs:
    """A registry, with jobs that record what they receive."""

    def __init__(self, size: int) -> None:
        """size: nodes of each role, and one SwarmX node, which two wafers need."""
        self.registry = NodeRegistry(5.0, SystemClock(), lambda node, reason: None)
        self.given: dict[str, Sequence[management_pb2.NodeInfo]] = {}
        self.ids = {
            f"{roles.role_of(role).module}-{index}:1": self.registry.add(
                management_pb2.RegisterRequest(role=role, address=f"{roles.role_of(role).module}-{index}:1", host="h")
            )
            for role in (*SHAPE, node_pb2.ROLE_SWARMX)
            for index in range(size if role in SHAPE else 1)
        }

    def enqueue(self, job: str, wafers: int = 1, created: float = 0.0) -> None:
        self.registry.open(job)
        wanted = management_pb2.Acquire(num_wafers=wafers, num_workers_per_wafer=1)
        self.registry.enqueue(Waiting(job=job, wanted=wanted, priority=2, created=created), _Waiter(self.given, job))


class _Waiter:
    def __init__(self, given: dict[str, Sequence[management_pb2.NodeInfo]], job: str) -> None:
        self._given, self._job = given, job

    def queued(self, status: management_pb2.QueueStatus) -> None:
        pass

    def admitted(self, nodes: Sequence[management_pb2.NodeInfo]) -> None:
        self._given[self._job] = nodes

    def refused(self, refusal: str) -> None:
        raise AssertionError(refusal)


def test_as_many_idle_jobs_are_preempted_as_the_next_job_needs_and_no_more() -> None:
    jobs = Jobs(3)
    for job in ("one", "two", "three"):
        jobs.enqueue(job)
    registry, idle = jobs.registry, ["three", "one", "two"]
    assert registry.to_preempt(idle) == []  # nobody waits
    jobs.enqueue("large", wafers=2, created=1.0)
    jobs.enqueue("later", created=2.0)
    assert registry.to_preempt(idle) == ["three", "one"]
    assert registry.to_preempt(["two"]) == ["two"]  # the others are not idle
    assert registry.to_preempt([]) == []


def test_nodes_that_a_preempted_job_has_given_back_count_before_they_are_free() -> None:
    jobs = Jobs(2)
    jobs.enqueue("one")
    jobs.enqueue("two")
    registry = jobs.registry
    jobs.enqueue("waits", created=1.0)
    assert registry.to_preempt(["one", "two"]) == ["one"]
    assert registry.reduce("one", [], _Waiter(jobs.given, "one")) == ""
    assert jobs.given["one"] == []
    assert registry.to_preempt(["two"]) == []
    assert "waits" not in jobs.given  # its nodes have not released the job
    for node in registry.nodes():
        if node.job == "one":
            assert node.member == ""
            registry.renew(node.node_id, "")
    assert len(jobs.given["waits"]) == len(SHAPE)


def test_a_node_that_registers_again_is_no_member_of_a_job_that_gave_it_back() -> None:
    jobs = Jobs(1)
    jobs.enqueue("one")
    registry = jobs.registry
    (wafer,) = (node for node in jobs.given["one"] if node.role == node_pb2.ROLE_WAFER)
    registry.reduce("one", [], _Waiter(jobs.given, "one"))
    hello = management_pb2.RegisterRequest(
        role=wafer.role, address=wafer.address, host="h", job="one", member=wafer.member
    )
    node_id = registry.add(hello)
    assert [node.member for node in registry.nodes() if node.node_id == node_id] == [""]


def test_a_job_is_idle_since_the_end_of_its_last_execution() -> None:
    jobs = JobTable(SystemClock())
    job = jobs.create("job-1", management_pb2.CreateJobRequest(user="ada"), "")
    job.started = 50.0
    status = management_pb2.QueueStatus(holders=[management_pb2.Holder(job="job-1"), management_pb2.Holder(job="gone")])
    for time, phase, since in (
        (100.0, management_pb2.JOB_PHASE_RUNNING, 0.0),
        (101.0, management_pb2.JOB_PHASE_IDLE, 101.0),
        (102.0, management_pb2.JOB_PHASE_IDLE, 101.0),
        (103.0, management_pb2.JOB_PHASE_COMPILING, 0.0),
        (104.0, management_pb2.JOB_PHASE_IDLE, 104.0),
    ):
        job.take(management_pb2.JobReport(phase=phase), time)
        assert job.idle_since == since
        described, unknown = jobs.with_holders(status).holders
        assert described == management_pb2.Holder(job="job-1", user="ada", since=50.0, idle_since=since)
        assert unknown == management_pb2.Holder(job="gone")


class _SetClock:
    """A clock whose time a test sets."""

    seconds = 0.0

    def time_ns(self) -> int:
        return int(self.seconds * 1e9)

    def monotonic(self) -> float:
        return self.seconds


def test_a_job_that_was_preempted_holds_its_nodes_since_it_got_them_again() -> None:
    clock = _SetClock()
    jobs = JobTable(clock)
    node = management_pb2.NodeInfo(node_id="n1", role=node_pb2.ROLE_WAFER)
    since: list[float] = []

    async def admit() -> None:
        job = jobs.create("job-1", management_pb2.CreateJobRequest(), "")
        coordination = Coordination(job, jobs, NodeRegistry(5.0, clock, lambda node, reason: None), clock)
        status = management_pb2.QueueStatus(holders=[management_pb2.Holder(job="job-1")])
        for clock.seconds, nodes in ((10.0, [node]), (20.0, [node]), (30.0, []), (40.0, [node])):
            coordination.admitted(nodes)
            since.append(jobs.with_holders(status).holders[0].since)
        assert job.started == 10.0

    asyncio.run(admit())
    assert since == [10.0, 10.0, 10.0, 40.0]
