"""Nodes in place of lost ones: who gets which, when, and what the coordinator is told meanwhile."""

import asyncio
import queue
import re
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster_in_process import Client, ClusterInProcess
from tokens_shown import shown, token

from appliance.coordinator import management_link
from appliance.coordinator.management_link import (
    ManagementCallbacks,
    ManagementLink,
    ManagementLost,
    ProcessIdentity,
)
from appliance.coordinator.settings import CoordinatorSettings
from appliance.management.nodes import replacements
from appliance.management.nodes.job_queue import Waiting
from appliance.management.nodes.registry import NodeRegistry
from waferbox import deadlines
from waferbox.host.clock import SystemClock
from waferbox.rpc.async_server import make_async_channel
from waferbox.rpc.server import make_channel
from waferbox.security.tokens import Kind
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import management_pb2, node_pb2, node_pb2_grpc

WAFER, WORKER = node_pb2.ROLE_WAFER, node_pb2.ROLE_WORKER
ALL = (WAFER, WORKER, node_pb2.ROLE_MEMORYX, node_pb2.ROLE_SWARMX)
WAIT_SECONDS = 30.0


class Told:
    """What a job in the registry is told."""

    def __init__(self) -> None:
        self.statuses: list[management_pb2.QueueStatus] = []
        self.given: list[Sequence[management_pb2.NodeInfo]] = []

    def queued(self, status: management_pb2.QueueStatus) -> None:
        self.statuses.append(status)

    def admitted(self, nodes: Sequence[management_pb2.NodeInfo]) -> None:
        self.given.append(nodes)

    def refused(self, refusal: str) -> None:
        raise AssertionError(refusal)


class Nodes:
    """A registry, and nodes that exist nowhere else."""

    def __init__(self) -> None:
        self.lost: list[management_pb2.NodeInfo] = []
        self.registry = NodeRegistry(5.0, SystemClock(), lambda node, reason: self.lost.append(node))
        self.registry._returning_until = 0.0
        self.registry.address = "h:1"
        self._ports = 0

    def add(
        self, role: "node_pb2.Role.ValueType", job: str = "", member: str = "", address: str = "", host: str = ""
    ) -> str:
        self._ports += 1
        hello = management_pb2.RegisterRequest(
            role=role, address=address or f"node:{self._ports}", job=job, member=member, host=host
        )
        return self.registry.add(hello)

    def one_of_each(self) -> list[str]:
        return [self.add(role) for role in ALL]

    def start(self, job: str, wafers: int = 1, priority: int = 2) -> Told:
        """A job that waits in the queue, or has its nodes."""
        told = Told()
        wanted = management_pb2.Acquire(num_wafers=wafers, num_workers_per_wafer=1)
        self.registry.open(job)
        self.registry.enqueue(Waiting(job=job, wanted=wanted, priority=priority, created=0.0), told)
        return told

    def replace(
        self,
        job: str,
        lost: Sequence[management_pb2.NodeInfo],
        told: Told,
        priority: int = 2,
        bound: Sequence[str] = (),
    ) -> str:
        request = management_pb2.Replace(nodes=lost, bound=bound)
        return self.registry.replace(job, request, told, priority=priority, created=0.0)

    def info(self, node_id: str) -> management_pb2.NodeInfo:
        return next(node for node in self.registry.nodes() if node.node_id == node_id)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def of(given: Sequence[management_pb2.NodeInfo], member: str) -> management_pb2.NodeInfo:
    return next(node for node in given if node.member == member)


def test_a_spare_takes_the_place_at_once_under_the_same_name(nodes: Nodes) -> None:
    wafer, *_ = nodes.one_of_each()
    told = nodes.start("one")
    before = told.given[0]
    spare = nodes.add(WAFER)
    nodes.registry.remove(wafer, "died")
    assert [node.member for node in nodes.lost] == ["wafer-0"]
    assert nodes.replace("one", [of(before, "wafer-0")], told) == ""
    after = told.given[1]
    assert of(after, "wafer-0").node_id == spare
    assert {node.member for node in after} == {node.member for node in before}
    assert {node.node_id for node in after} == {node.node_id for node in before} - {wafer} | {spare}
    assert not told.statuses


def test_a_job_that_goes_on_with_fewer_gives_back_the_others(nodes: Nodes) -> None:
    wafer, other, *_ = [nodes.add(WAFER), nodes.add(WAFER), *nodes.one_of_each()[1:], nodes.add(WORKER)]
    told = nodes.start("one", wafers=2)
    before = told.given[0]
    nodes.registry.remove(wafer, "died")
    assert nodes.replace("one", [of(before, "wafer-0")], told) == ""
    moved = management_pb2.NodeInfo()
    moved.CopyFrom(of(before, "wafer-1"))
    moved.member = "wafer-0"
    names = ("memoryx-0", "swarmx-0", "worker-0")
    kept = [moved, *(of(before, name) for name in names)]
    assert nodes.registry.reduce("one", kept, told) == ""
    assert len(told.given) == 3  # who had waited for another has an answer as well
    assert {node.member: node.node_id for node in told.given[-1]}["wafer-0"] == other
    assert {node.member for node in nodes.registry.held("one")} == {"wafer-0", *names}
    spare = nodes.add(WAFER)
    assert not nodes.info(spare).job  # it waits no more
    let_go = of(before, "worker-1").node_id
    assert (nodes.info(let_go).job, nodes.info(let_go).member) == ("one", "")
    nodes.registry.renew(let_go, "")
    assert not nodes.info(let_go).job
    moved.address = "elsewhere:1"
    assert nodes.registry.reduce("one", [moved], told) == "one has no nodes at elsewhere:1"


def test_a_job_waits_for_nodes_before_the_queue_and_is_told_what_for(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, missing_nodes=1000.0))
    wafer, worker, *_ = nodes.one_of_each()
    told = nodes.start("one", priority=3)
    queued = nodes.start("two", priority=1)
    for node_id in (wafer, worker):
        nodes.registry.remove(node_id, "died")
    lost = [of(told.given[0], "wafer-0")]
    assert nodes.replace("one", lost, told, priority=3) == ""
    nodes.registry.review()
    (status,) = told.statuses
    assert (status.position, status.waiting_for) == (
        0,
        "1 wafer, not in the cluster; to add one: python -m wafer --management h:1",
    )
    assert nodes.registry.queue_status()["one"] == status
    nodes.registry.review()
    assert len(told.statuses) == 1
    # A second death adds to it; each request has its answer.
    assert nodes.replace("one", [of(told.given[0], "worker-0")], told, priority=3) == ""
    nodes.registry.review()
    assert told.statuses[1].waiting_for == (
        "1 wafer, not in the cluster; to add one: python -m wafer --management h:1; "
        "1 input worker, not in the cluster; to add one: python -m workers --management h:1"
    )
    new_worker = nodes.add(WORKER)
    assert nodes.info(new_worker).job == "one"
    assert len(told.given) == 1
    new_wafer = nodes.add(WAFER)
    assert told.statuses[2:] == [management_pb2.QueueStatus()]
    assert told.given[1] == told.given[2]
    assert len(told.given) == 3
    assert (of(told.given[1], "wafer-0").node_id, of(told.given[1], "worker-0").node_id) == (new_wafer, new_worker)
    assert not queued.given
    assert "one" not in nodes.registry.queue_status()


def test_a_replacement_that_dies_before_it_is_told_of_is_replaced_without_a_word(nodes: Nodes) -> None:
    wafer, worker, *_ = nodes.one_of_each()
    told = nodes.start("one")
    for node_id in (wafer, worker):
        nodes.registry.remove(node_id, "died")
    nodes.lost.clear()
    nodes.replace("one", [of(told.given[0], name) for name in ("wafer-0", "worker-0")], told)
    first = nodes.add(WAFER)
    nodes.registry.remove(first, "died too")
    assert not nodes.lost
    nodes.add(WORKER)
    assert len(told.given) == 1
    second = nodes.add(WAFER)
    assert of(told.given[1], "wafer-0").node_id == second
    nodes.registry.remove(second, "died as well")
    assert [node.node_id for node in nodes.lost] == [second]


@pytest.mark.parametrize("is_bound", [True, False])
def test_states_that_only_a_host_has_wait_for_a_node_there(
    nodes: Nodes, is_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "RECOVERY", replace(deadlines.RECOVERY, launcher=0.0))
    for role in (WAFER, WORKER, node_pb2.ROLE_SWARMX):
        nodes.add(role)
    nodes.add(node_pb2.ROLE_MEMORYX, host="one")
    told = nodes.start("job")
    elsewhere = nodes.add(node_pb2.ROLE_MEMORYX, host="two")
    lost = of(told.given[0], "memoryx-0")
    nodes.registry.remove(lost.node_id, "died")
    assert nodes.replace("job", [lost], told, bound=["memoryx-0"] if is_bound else []) == ""
    if is_bound:
        nodes.registry.review()
        assert told.statuses[-1].waiting_for == "memoryx-0 on one, whose disk has states of the job"
        there = nodes.add(node_pb2.ROLE_MEMORYX, host="one")
    assert of(told.given[1], "memoryx-0").node_id == (there if is_bound else elsewhere)


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_node_that_is_taken_for_another_job_is_replaced_where_its_states_are(
    nodes: Nodes, is_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "RECOVERY", replace(deadlines.RECOVERY, launcher=0.0))
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, missing_nodes=0.0))
    for host in ("one", "two"):
        for role in ALL:
            nodes.add(role, host=host)
    first, second = nodes.start("first", priority=1), nodes.start("second", priority=2)
    lost = of(first.given[0], "memoryx-0"), of(second.given[0], "worker-0")
    nodes.registry.remove(lost[1].node_id, "died")
    assert nodes.replace("second", lost[1:], second, bound=["memoryx-0"] if is_bound else []) == ""
    nodes.registry.remove(lost[0].node_id, "died")
    assert nodes.replace("first", lost[:1], first, priority=1) == ""
    nodes.registry.review()
    taken = nodes.lost[-1]
    assert (taken.job, taken.member, taken.host) == ("second", "memoryx-0", "two")
    nodes.registry.renew(taken.node_id, "")
    assert of(first.given[1], "memoryx-0").node_id == taken.node_id
    nodes.add(WORKER)
    nodes.add(node_pb2.ROLE_MEMORYX, host="one")
    there = nodes.add(node_pb2.ROLE_MEMORYX, host="two")
    assert (of(second.given[1], "memoryx-0").node_id == there) is is_bound


def test_a_node_that_was_given_up_is_nobodys_until_the_job_has_let_it_go(nodes: Nodes) -> None:
    wafer, *_ = nodes.one_of_each()
    told = nodes.start("one")
    nodes.replace("one", [of(told.given[0], "wafer-0")], told)
    assert (nodes.info(wafer).job, nodes.info(wafer).member) == ("one", "")
    assert [node.member for node in nodes.registry.held("one")] == ["worker-0", "memoryx-0"]
    assert nodes.registry.renew(wafer, "one")
    assert len(told.given) == 1
    # Its end concerns nobody; nor does it get its place back when it registers anew.
    nodes.registry.remove(wafer, "its lease has ended")
    assert not nodes.lost
    again = nodes.add(WAFER, "one", "wafer-0", of(told.given[0], "wafer-0").address)
    assert (nodes.info(again).job, nodes.info(again).member) == ("one", "")
    # When it says that it works for nobody it is as good as any other.
    assert nodes.registry.renew(again, "")
    assert of(told.given[1], "wafer-0").node_id == again


def test_a_node_that_comes_back_does_not_take_the_place_of_its_replacement(nodes: Nodes) -> None:
    wafer, *_ = nodes.one_of_each()
    told = nodes.start("one")
    spare = nodes.add(WAFER)
    nodes.registry.remove(wafer, "its lease has ended")
    nodes.replace("one", [of(told.given[0], "wafer-0")], told)
    again = nodes.add(WAFER, "one", "wafer-0", of(told.given[0], "wafer-0").address)
    assert (nodes.info(again).job, nodes.info(again).member) == ("one", "")
    assert (nodes.info(spare).job, nodes.info(spare).member) == ("one", "wafer-0")
    nodes.registry.remove(again, "died")
    assert [node.node_id for node in nodes.lost] == [wafer]


def test_a_node_that_registers_again_is_lost_to_its_job_and_is_leased_once(nodes: Nodes) -> None:
    wafer, *_ = nodes.one_of_each()
    told = nodes.start("one")
    given = of(told.given[0], "wafer-0")
    again = nodes.add(WAFER, "one", "wafer-0", given.address)  # before management notices the end of its stream
    assert [node.node_id for node in nodes.lost] == [wafer]
    nodes.replace("one", [given], told)
    assert len(told.given) == 1  # it has not released the job yet
    assert nodes.registry.renew(again, "")
    assert [node.node_id for node in told.given[1] if node.role == WAFER] == [again]


def test_the_end_of_the_job_frees_what_it_gave_up(nodes: Nodes) -> None:
    wafer, *_ = nodes.one_of_each()
    told = nodes.start("one")
    nodes.replace("one", [of(told.given[0], "wafer-0")], told)
    nodes.registry.release("one")
    assert not nodes.info(wafer).job
    assert nodes.start("two").given


def test_jobs_are_given_replacements_in_the_order_of_the_queue(nodes: Nodes) -> None:
    wafers = [nodes.one_of_each()[0] for _ in range(2)]
    low, high = nodes.start("low", priority=3), nodes.start("high", priority=1)
    for wafer in wafers:
        nodes.registry.remove(wafer, "died")
    for job, told, priority in (("low", low, 3), ("high", high, 1)):
        nodes.replace(job, [of(told.given[0], "wafer-0")], told, priority)
    nodes.registry.review()
    nodes.add(WAFER)
    assert (len(low.given), len(high.given)) == (1, 2)
    nodes.registry.review()
    assert low.statuses[-1].waiting_for == ("1 wafer, held by high; to add one: python -m wafer --management h:1")
    nodes.add(WAFER)
    assert len(low.given) == 2


def test_what_is_no_node_of_the_job_is_not_replaced(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    wafer, *_ = nodes.one_of_each()
    told = nodes.start("one")
    lost = of(told.given[0], "wafer-0")
    stranger = management_pb2.NodeInfo(role=WAFER, member="wafer-7", address="h:7")
    assert nodes.replace("one", [lost, stranger], told) == "one has no nodes wafer-7"
    assert nodes.replace("two", [lost], told) == "two has no nodes wafer-0"
    assert nodes.info(wafer).member == "wafer-0"
    monkeypatch.setattr(replacements, "MAX_REQUESTS", 2)
    nodes.registry.remove(wafer, "died")
    assert [nodes.replace("one", [lost], told) for _ in range(3)][:2] == ["", ""]
    assert "answers already" in nodes.replace("one", [lost], told)


def test_a_job_of_an_earlier_management_service_says_which_nodes_it_has(nodes: Nodes) -> None:
    nodes.one_of_each()
    told = nodes.start("one")
    before = told.given[0]
    later = Nodes()
    later.registry._returning_until = float("inf")
    # The one that was replaced, and one of those that work for the job, are there before the coordinator.
    stray = later.add(WAFER, "one", "wafer-0", "elsewhere:1")
    worker = later.add(WORKER, "one", "worker-0", of(before, "worker-0").address)
    later.registry.open("one", before)
    assert (later.info(stray).job, later.info(stray).member) == ("one", "")
    assert later.info(worker).member == "worker-0"
    assert later.replace("one", [of(before, "wafer-0")], told) == ""
    new = later.add(WAFER)
    after = told.given[1]
    assert of(after, "wafer-0").node_id == new
    assert of(after, "worker-0").node_id == worker
    assert of(after, "memoryx-0") == of(before, "memoryx-0")  # it will register anew, if it lives


def test_nodes_that_return_without_a_job_are_kept_for_the_one_that_had_them(nodes: Nodes) -> None:
    """Its coordinator has died with management: nobody is attached to them."""
    nodes.one_of_each()
    before = nodes.start("one").given[0]
    later, told, wanted = Nodes(), Told(), management_pb2.Acquire(num_wafers=1, num_workers_per_wafer=1)
    later.registry._returning_until = float("inf")
    wafer = later.add(WAFER, address=of(before, "wafer-0").address)  # is there before the job
    later.registry.open("one", before)
    later.registry.enqueue(Waiting(job="one", wanted=wanted, priority=2, created=0.0), told)
    stranger = later.add(WAFER, address=of(before, "worker-0").address)  # of another role: it has the address by chance
    assert later.info(stranger).job == ""
    others = [later.add(node.role, address=node.address) for node in before if node.member != "wafer-0"]
    assert (later.info(wafer).job, later.info(wafer).member) == ("one", "wafer-0")
    assert sorted(node.node_id for node in told.given[0]) == sorted([wafer, *others])
    assert len(told.given) == 1


def test_a_successor_has_the_replacements_that_were_kept_while_others_were_missing(nodes: Nodes) -> None:
    wafer, worker, *_ = nodes.one_of_each()
    told = nodes.start("one")
    before = told.given[0]
    for each in (wafer, worker):
        nodes.registry.remove(each, "died")
    assert nodes.replace("one", [of(before, "wafer-0"), of(before, "worker-0")], told) == ""
    kept = nodes.add(WAFER)  # is kept until there is a worker
    nodes.registry.leave("one", told, has_ended=False)
    successor = Told()
    wanted = management_pb2.Acquire(num_wafers=1, num_workers_per_wafer=1)
    nodes.registry.enqueue(Waiting(job="one", wanted=wanted, priority=2, created=0.0), successor)
    assert of(successor.given[0], "wafer-0").node_id == kept
    assert nodes.registry.reduce("one", successor.given[0], successor) == ""


def test_a_job_that_waited_when_management_was_killed_waits_for_nodes_that_have_not_registered_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, missing_nodes=0.0))
    nodes.registry._returning_until = float("inf")
    told, wanted = Told(), management_pb2.Acquire(num_wafers=1, num_workers_per_wafer=1)
    nodes.registry.open("one", [])
    nodes.registry.enqueue(Waiting(job="one", wanted=wanted, priority=2, created=0.0), told)
    for _ in range(2):
        nodes.registry.review()  # fails if it refuses the job
    nodes.one_of_each()
    assert len(told.given) == 1


# --- with a coordinator's link ----------------------------------------------------------------------------------------


class Listening:
    """What the link receives."""

    def __init__(self) -> None:
        self.lost: list[management_pb2.NodeInfo] = []
        self.statuses: list[management_pb2.QueueStatus] = []
        self.hellos: list[management_pb2.CoordinatorHello] = []

    def callbacks(self) -> ManagementCallbacks:
        def refuse(error: Exception) -> None:
            raise AssertionError from error

        return ManagementCallbacks(
            cancel=lambda _: None,
            lease_lost=self.lost.append,
            known_as=lambda management, hello: self.hellos.append(hello),
            queued=self.statuses.append,
            preempt=lambda: None,
            trace=lambda request: None,
            history=list,
            management_lost=lambda reason: None,
            defect=refuse,
        )


class Linked:
    """A job whose coordinator is nothing but its link."""

    def __init__(self, cluster: ClusterInProcess, tmp_path: Path) -> None:
        supervisor = cluster.service._supervisor
        request = management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1, priority=2)
        job = supervisor.jobs.create("job-1", request, token(Kind.JOB, "job-1"))
        supervisor.registry.open(job.name)
        cluster.call(lambda: supervisor._supervise(job, "").take(None))
        self.job = job.name
        self.listening = Listening()
        settings = CoordinatorSettings(
            job=job.name,
            token=job.token,
            created=job.created,
            management=cluster.address,
            listen="127.0.0.1:0",
            cache=tmp_path,
            cache_root=tmp_path,
            terminated="",
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._settings = settings
        self.link = self.run(self._open(None)).result(WAIT_SECONDS)
        self.nodes = self.acquire().result(WAIT_SECONDS).nodes

    async def _open(self, earlier: management_pb2.CoordinatorHello | None) -> ManagementLink:
        identity = ProcessIdentity(process_id=1, process_started=1, host="host")
        link = ManagementLink(self._settings, "127.0.0.1:1", make_async_channel, identity, SystemClock())
        await link.hello()
        if earlier is not None:
            link.continue_from(earlier)
        link.listen(self.listening.callbacks())
        return link

    def acquire(self) -> "Future[management_pb2.Acquired]":
        return self.run(self.link.acquire(management_pb2.Acquire(num_wafers=1, num_workers_per_wafer=1)))

    def succeed(self) -> None:
        """Another coordinator takes over from the present one, which dies."""
        earlier = self.listening.hellos[-1]
        self.run(self.link.close(wait=False)).result(WAIT_SECONDS)
        self.link = self.run(self._open(earlier)).result(WAIT_SECONDS)

    def run(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def replace(
        self, lost: Sequence[management_pb2.NodeInfo], seconds: float | None = None
    ) -> "Future[management_pb2.Acquired]":
        return self.run(self.link.replace(lost, seconds))

    def close(self) -> None:
        async def close() -> None:
            # Otherwise management waits for another coordinator.
            self.link.report(management_pb2.JobReport(phase=management_pb2.JOB_PHASE_CANCELLED))
            await self.link.close(wait=False)

        self.run(close()).result(WAIT_SECONDS)

    def end(self) -> None:
        self.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def linked(cluster: ClusterInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Linked]:
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, retry=0.05))
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, retry=0.05))
    cluster.add(memoryx=1, swarmx=1, wafer=1, workers=1)
    linked = Linked(cluster, tmp_path)
    yield linked
    linked.end()


def test_the_link_waits_for_a_node_that_comes_later(cluster: ClusterInProcess, linked: Linked) -> None:
    lost = of(linked.nodes, "wafer-0")
    cluster.kill(next(i for i, (module, _) in enumerate(cluster.nodes) if module == "wafer"))
    cluster.until(lambda: linked.listening.lost)  # who is replaced is missed no more
    answer = linked.replace([lost])
    cluster.until(lambda: any("1 wafer, not in the cluster" in s.waiting_for for s in linked.listening.statuses))
    cluster.add(wafer=1)
    nodes = answer.result(WAIT_SECONDS).nodes
    assert of(nodes, "wafer-0").address == cluster.nodes[-1][1].address
    cluster.until(lambda: not linked.listening.statuses[-1].waiting_for)
    assert {node.member for node in nodes} == {node.member for node in linked.nodes}


def test_management_is_away_until_it_is_back_or_given_up(
    cluster: ClusterInProcess, linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not linked.link.is_briefly_away
    address = cluster.address
    cluster.stop_management()
    cluster.until(lambda: linked.link._lost)

    async def is_briefly_away() -> bool:
        return linked.link.is_briefly_away

    assert linked.run(is_briefly_away()).result(WAIT_SECONDS)
    with monkeypatch.context() as patch:
        patch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, management_away=0.0))
        assert not linked.run(is_briefly_away()).result(WAIT_SECONDS)
    cluster.start_management(address)
    cluster.until(lambda: not linked.link._lost)
    assert not linked.run(is_briefly_away()).result(WAIT_SECONDS)


def test_a_coordinator_of_another_version_says_so(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was installed while the cluster ran."""
    monkeypatch.setattr(management_link, "WIRE_VERSION", "0.1.0+new")
    with pytest.raises(ManagementLost, match=rf"0\.1\.0\+new, and .*{re.escape(WIRE_VERSION)}: install the same"):
        linked.run(linked._open(None)).result(WAIT_SECONDS)


def test_a_successor_gets_the_nodes_from_a_management_service_that_was_started_before_it_had_them(
    cluster: ClusterInProcess, linked: Linked
) -> None:
    linked.succeed()
    address = cluster.address
    cluster.stop_management()
    cluster.start_management(address)
    cluster.until(cluster.jobs)
    before = {(node.member, node.address) for node in linked.nodes}
    known = cluster.service._registry._jobs[linked.job]
    assert {(member, node.address) for member, node in known.items()} == before
    after = linked.acquire().result(WAIT_SECONDS).nodes
    assert {(node.member, node.address) for node in after} == before


def test_the_link_asks_a_management_service_that_was_started_meanwhile(
    cluster: ClusterInProcess, linked: Linked
) -> None:
    lost = of(linked.nodes, "wafer-0")
    cluster.kill(next(i for i, (module, _) in enumerate(cluster.nodes) if module == "wafer"))
    answer = linked.replace([lost])
    cluster.until(lambda: any(s.waiting_for for s in linked.listening.statuses))
    address = cluster.address
    cluster.stop_management()
    cluster.start_management(address)
    cluster.wait_for_nodes(3)
    cluster.add(wafer=1)
    nodes = answer.result(WAIT_SECONDS).nodes
    assert of(nodes, "wafer-0").address == cluster.nodes[-1][1].address
    assert {(node.member, node.address) for node in nodes if node.member != "wafer-0"} == {
        (node.member, node.address) for node in linked.nodes if node.member != "wafer-0"
    }
    # What it says of its nodes is up to date for the next one.
    cluster.stop_management()
    cluster.start_management(address)
    cluster.until(cluster.jobs)
    known = cluster.service._registry._jobs[linked.job]
    assert {member: node.address for member, node in known.items()} == {node.member: node.address for node in nodes}


def test_the_wait_for_replacements_has_ends(cluster: ClusterInProcess, linked: Linked) -> None:
    lost = of(linked.nodes, "wafer-0")
    cluster.kill(next(i for i, (module, _) in enumerate(cluster.nodes) if module == "wafer"))
    with pytest.raises(TimeoutError, match="management had no free node"):
        linked.replace([lost], 0.05).result(WAIT_SECONDS)
    answer = linked.replace([lost])
    cluster.until(lambda: any(s.waiting_for for s in linked.listening.statuses))
    linked.close()
    with pytest.raises(ManagementLost):
        answer.result(WAIT_SECONDS)


def test_a_late_answer_is_not_taken_for_that_of_a_later_request(cluster: ClusterInProcess, linked: Linked) -> None:
    lost = of(linked.nodes, "wafer-0")
    cluster.kill(next(i for i, (module, _) in enumerate(cluster.nodes) if module == "wafer"))
    with pytest.raises(TimeoutError):
        linked.replace([lost], 0.05).result(WAIT_SECONDS)
    answer = linked.replace([of(linked.nodes, "worker-0")])
    cluster.add(wafer=1)
    nodes = answer.result(WAIT_SECONDS).nodes  # the worker lives, and is free again soon
    assert of(nodes, "wafer-0").address == cluster.nodes[-1][1].address
    assert of(nodes, "worker-0").address == of(linked.nodes, "worker-0").address
    assert not linked.link._unanswered


def test_a_node_says_when_the_job_has_let_it_go(cluster: ClusterInProcess, linked: Linked) -> None:
    wafer = of(linked.nodes, "wafer-0")
    commands: queue.SimpleQueue[node_pb2.AttachRequest | None] = queue.SimpleQueue()
    commands.put(node_pb2.AttachRequest(attach=node_pb2.AttachJob(job=linked.job, node="wafer-0")))
    with make_channel(wafer.address, wafer.lease) as channel:
        responses = iter(node_pb2_grpc.NodeServiceStub(channel).Attach(iter(commands.get, None)))
        next(responses)
        heard = threading.Event()
        renew = cluster.service._registry.renew

        def heartbeat(node_id: str, job: str) -> bool:
            if node_id == wafer.node_id and job == linked.job:
                heard.set()
            return bool(renew(node_id, job))

        cluster.service._registry.renew = heartbeat  # type: ignore[method-assign]  # of this cluster alone
        assert heard.wait(WAIT_SECONDS)
        heard.clear()
        answer = linked.replace([wafer])
        cluster.until(lambda: [n.member for n in cluster.wait_for_nodes(4) if n.address == wafer.address] == [""])
        heard.clear()
        assert heard.wait(WAIT_SECONDS)
        assert not answer.done()
        commands.put(None)
        assert of(answer.result(WAIT_SECONDS).nodes, "wafer-0").address == wafer.address


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"member": "wafer-9"}, "has no nodes wafer-9"),
        ({"address": ""}, "has a name in it, and an address"),
        ({"role": 77}, "there is no role 77"),
        ({"host": "h" * 1000}, "256 characters"),
        ({"instance": "i" * 1000}, "256 characters"),
    ],
)
def test_management_refuses_requests_that_are_wrong(
    cluster: ClusterInProcess, client: Callable[..., Client], wrong: dict[str, Any], said: str
) -> None:
    cluster.add(memoryx=1, swarmx=1, wafer=1, workers=1)
    job = client().created
    fields: dict[str, Any] = {"role": WAFER, "member": "wafer-0", "address": "h:1", **wrong}
    requests = [
        management_pb2.CoordinateRequest(hello=management_pb2.CoordinatorHello(job=job.job, token=job.token)),
        management_pb2.CoordinateRequest(replace=management_pb2.Replace(nodes=[management_pb2.NodeInfo(**fields)])),
    ]
    shows = shown(Kind.COORDINATOR, job.job)
    with pytest.raises(grpc.RpcError) as caught:
        list(cluster.stub.Coordinate(iter(requests), timeout=WAIT_SECONDS, metadata=shows))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert said in str(caught.value.details())


def test_jobs_that_hold_what_the_other_waits_for_do_not_wait_for_ever(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss that leaves too few nodes for both, the second gives up its own for the first."""
    wafers = [nodes.add(WAFER) for _ in range(4)]
    for role, count in ((WORKER, 4), (node_pb2.ROLE_MEMORYX, 2), (node_pb2.ROLE_SWARMX, 2)):
        for _ in range(count):
            nodes.add(role)
    first, second = nodes.start("one", wafers=2), nodes.start("two", wafers=2)
    given = {"one": first.given[0], "two": second.given[0]}
    for wafer in wafers[1:3]:  # one of each job
        nodes.registry.remove(wafer, "died")
    for job, told, member in (("one", first, "wafer-1"), ("two", second, "wafer-0")):
        assert nodes.replace(job, [of(given[job], member)], told) == ""
    nodes.lost.clear()
    nodes.registry.review()
    assert not nodes.lost  # a launcher may add nodes soon
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, missing_nodes=-1.0))
    for _ in range(3):
        nodes.registry.review()
    assert [(node.job, node.member) for node in nodes.lost] == [("two", "wafer-1")]
    nodes.registry.renew(wafers[3], "")  # its job has released it
    assert of(first.given[1], "wafer-1").node_id == wafers[3]
    assert len(second.given) == 1
    nodes.add(WAFER)
    nodes.add(WAFER)
    assert {node.member for node in second.given[1]} == {node.member for node in given["two"]}


# --- Lost nodes whose replacement nobody has requested yet ------------------------------------------------------------


def test_the_queue_does_not_get_what_could_replace_a_lost_node_until_its_job_has_requested_it(nodes: Nodes) -> None:
    wafer, *_ = nodes.one_of_each()
    told = nodes.start("one")
    before = told.given[0]
    for role in ALL[1:]:
        nodes.add(role)
    waits = nodes.start("two")
    nodes.registry.remove(wafer, "died")
    spare = nodes.add(WAFER)  # the coordinator of "one" is being replaced, and requests nothing
    assert not waits.given
    assert nodes.info(spare).job == ""
    assert nodes.replace("one", [of(before, "wafer-0")], told) == ""
    assert of(told.given[-1], "wafer-0").node_id == spare
    assert not waits.given
    nodes.add(WAFER)
    assert waits.given


@pytest.mark.parametrize("end", ["registers again", "release", "reduce"])
def test_the_queue_gets_it_when_the_job_no_longer_needs_it(nodes: Nodes, end: str) -> None:
    wafer, *_ = nodes.one_of_each()
    told = nodes.start("one")
    before = told.given[0]
    for role in ALL[1:]:
        nodes.add(role)
    waits = nodes.start("two")
    nodes.registry.remove(wafer, "its stream broke")
    nodes.add(WAFER)
    assert not waits.given
    if end == "registers again":
        nodes.add(WAFER, job="one", member="wafer-0", address=of(before, "wafer-0").address)
    elif end == "release":
        nodes.registry.release("one")
    else:
        kept = [node for node in before if node.member != "wafer-0"]
        assert nodes.registry.reduce("one", kept, told) == ""
    assert waits.given


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_request_for_a_replacement_outlives_its_coordinator_but_not_its_job(nodes: Nodes, has_ended: bool) -> None:
    wafer, *_ = nodes.one_of_each()
    told = nodes.start("one")
    before = told.given[0]
    for role in ALL[1:]:
        nodes.add(role)
    waits = nodes.start("two")
    nodes.registry.remove(wafer, "died")
    assert nodes.replace("one", [of(before, "wafer-0")], told) == ""
    nodes.registry.leave("one", told, has_ended=has_ended)
    spare = nodes.add(WAFER)
    assert bool(waits.given) is has_ended
    if not has_ended:
        successor = Told()
        assert nodes.replace("one", [of(before, "wafer-0")], successor) == ""
        assert of(successor.given[-1], "wafer-0").node_id == spare
