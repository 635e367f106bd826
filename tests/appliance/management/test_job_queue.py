"""Who gets which nodes, and when: the queue without processes or threads."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.management.nodes.allocation import Inventory, lease, possible, refusal, waiting_for
from appliance.management.nodes.job_queue import JobQueue, Waiting
from waferbox import roles
from wsc.v1 import management_pb2, plan_pb2

ROLES = {role.name: role.number for role in roles.LEASED}


def cluster(**counts: int) -> list[management_pb2.NodeInfo]:
    return [
        management_pb2.NodeInfo(node_id=f"{name}{number}", role=ROLES[name])
        for name, count in counts.items()
        for number in range(count)
    ]


def wanted(wafers: int = 1, workers: int = 1, shards: int = 0) -> management_pb2.Acquire:
    return management_pb2.Acquire(num_wafers=wafers, num_workers_per_wafer=workers, max_shards=shards)


def waiting(job: str, wafers: int = 1, priority: int = 2, created: float = 0.0) -> Waiting:
    return Waiting(job=job, wanted=wanted(wafers), priority=priority, created=created)


def counts(nodes: object) -> dict[str, int]:
    assert nodes is not None
    return dict(Counter(node.member.partition("-")[0] for node in nodes))  # type: ignore[attr-defined]


def admitted(queue: JobQueue, nodes: list[management_pb2.NodeInfo]) -> list[str]:
    return [admission.job for admission in queue.admit(nodes)]


def test_a_job_gets_its_share_and_leaves_the_rest_to_others() -> None:
    nodes = cluster(wafer=4, worker=8, memoryx=6, swarmx=4)
    assert counts(lease("one", wanted(2, workers=2), Inventory(nodes))) == {
        "wafer": 2,
        "worker": 4,
        "memoryx": 3,
        "swarmx": 1,
    }
    assert counts(lease("two", wanted(1), Inventory(nodes))) == {"wafer": 1, "worker": 1, "memoryx": 1}
    # More than its share where it asks for it, and as many as are free.
    assert counts(lease("three", wanted(1, shards=5), Inventory(nodes)))["memoryx"] == 2
    assert {node.member for node in nodes if node.job == "one"} == {
        *("wafer-0", "wafer-1", "worker-0", "worker-1", "worker-2", "worker-3"),
        *("memoryx-0", "memoryx-1", "memoryx-2", "swarmx-0"),
    }


def on_hosts(**numbers: Sequence[int]) -> list[management_pb2.NodeInfo]:
    """The nodes of a cluster. numbers: by role, how many are on each host."""
    nodes = []
    for role, counts in numbers.items():
        for host, count in enumerate(counts):
            for node in cluster(**{role: count}):
                node.host = f"host-{host}"
                nodes.append(node)
    return nodes


def hosts_of(nodes: Sequence[management_pb2.NodeInfo] | None, role: str) -> list[int]:
    """The host of each member of a role, in order."""
    assert nodes is not None
    members = {node.member: int(node.host.removeprefix("host-")) for node in nodes}
    return [members[f"{role}-{i}"] for i in range(sum(name.startswith(role) for name in members))]


def test_a_job_gets_the_host_that_its_wafers_fill_and_its_other_nodes_there() -> None:
    nodes = on_hosts(wafer=[1, 4, 2], worker=[2, 8, 4], memoryx=[2, 2, 2], swarmx=[3, 3, 3])
    leased = lease("one", wanted(2, workers=2, shards=2), Inventory(nodes))
    assert hosts_of(leased, "wafer") == [2, 2]
    assert hosts_of(leased, "worker") == [2, 2, 2, 2]
    assert hosts_of(leased, "memoryx") == [2, 2]
    assert hosts_of(leased, "swarmx") == [2]


def test_a_job_of_several_hosts_gets_shards_and_swarmx_nodes_on_each_of_them() -> None:
    nodes = on_hosts(wafer=[1, 2, 2], worker=[1, 2, 2], memoryx=[1, 1, 1], swarmx=[1, 1, 1])
    leased = lease("one", wanted(5), Inventory(nodes))
    assert hosts_of(leased, "wafer") == hosts_of(leased, "worker") == [1, 1, 2, 2, 0]
    assert hosts_of(leased, "memoryx") == hosts_of(leased, "swarmx") == [1, 2, 0]


def test_what_is_not_free_on_a_host_comes_from_another() -> None:
    nodes = on_hosts(wafer=[1, 1], worker=[2, 0], memoryx=[0, 1], swarmx=[0, 1])
    leased = lease("one", wanted(2), Inventory(nodes))
    assert hosts_of(leased, "worker") == [0, 0]
    assert hosts_of(leased, "memoryx") == hosts_of(leased, "swarmx") == [1]


def test_a_job_in_layer_pipelined_mode_gets_a_wafer_and_its_workers_alone() -> None:
    asked = wanted(1, workers=2)
    asked.execution_strategy = plan_pb2.EXECUTION_STRATEGY_PIPELINE
    assert possible(asked, Inventory(cluster(wafer=1, worker=2)))
    nodes = cluster(wafer=1, worker=2, memoryx=1, swarmx=1)
    assert counts(lease("one", asked, Inventory(nodes))) == {"wafer": 1, "worker": 2}
    text, holders = waiting_for("two", asked, Inventory(nodes))
    assert text == "1 wafer, held by one; 2 input workers, held by one"
    assert holders == ["one"]


def test_a_job_gets_all_that_it_needs_or_nothing() -> None:
    nodes = cluster(wafer=2, worker=1, memoryx=1, swarmx=1)
    assert lease("one", wanted(2), Inventory(nodes)) is None
    assert not any(node.job or node.member for node in nodes)


@pytest.mark.parametrize(("there", "used"), [(1, 1), (2, 1), (3, 3), (7, 3)])
def test_a_tree_is_used_when_there_are_nodes_for_it(there: int, used: int) -> None:
    nodes = cluster(wafer=6, worker=6, memoryx=1, swarmx=there)
    assert counts(lease("one", wanted(6), Inventory(nodes)))["swarmx"] == used


def test_two_jobs_share_a_cluster_of_two_of_each() -> None:
    nodes = cluster(wafer=2, worker=2, memoryx=2, swarmx=2)
    queue = JobQueue()
    for job in ("one", "two", "three"):
        queue.put(waiting(job))
    assert admitted(queue, nodes) == ["one", "three"]  # equally old: by name
    status = queue.status(nodes).get("two")
    assert status is not None
    assert (status.position, status.length) == (1, 1)
    assert status.waiting_for == (
        "1 wafer, held by one, three; 1 input worker, held by one, three; 1 MemoryX node, held by one, three"
    )


def test_a_single_wafer_waits_for_no_swarmx_node() -> None:
    nodes = cluster(wafer=4, worker=4, memoryx=2, swarmx=1)
    assert counts(lease("two", wanted(2, shards=1), Inventory(nodes)))["swarmx"] == 1
    assert waiting_for("four", wanted(2), Inventory(nodes)) == ("1 SwarmX node, held by two", ["two"])
    assert waiting_for("four", wanted(1), Inventory(nodes)) == ("", [])
    assert "swarmx" not in counts(lease("one", wanted(1), Inventory(nodes)))
    assert possible(wanted(1), Inventory(cluster(wafer=1, worker=1, memoryx=1)))


def test_a_job_that_waits_for_its_own_nodes_is_not_their_holder() -> None:
    """It was idle and gives its nodes back, and already asks for nodes again."""
    nodes = cluster(wafer=2, worker=2, memoryx=2)
    assert lease("one", wanted(shards=1), Inventory(nodes))
    assert lease("two", wanted(shards=1), Inventory(nodes))
    queue = JobQueue()
    queue.put(waiting("one"))
    status = queue.status(nodes)["one"]
    assert status.waiting_for == "; ".join(
        f"1 {name}, held by two and given back by this job just now"
        for name in ("wafer", "input worker", "MemoryX node")
    )
    assert [holder.job for holder in status.holders] == ["two"]
    for node in nodes:
        node.job = node.job and "one"
    status = queue.status(nodes)["one"]
    assert status.waiting_for.startswith("1 wafer, given back by this job just now; ")
    assert not status.holders


def test_the_role_that_lacks_is_the_one_that_is_named() -> None:
    nodes = cluster(wafer=2, worker=2, memoryx=1, swarmx=2)
    assert lease("one", wanted(), Inventory(nodes))
    assert waiting_for("four", wanted(), Inventory(nodes)) == ("1 MemoryX node, held by one", ["one"])


def test_the_order_is_priority_then_age_and_nobody_overtakes() -> None:
    nodes = cluster(wafer=2, worker=2, memoryx=2, swarmx=2)
    assert lease("runs", wanted(), Inventory(nodes))
    queue = JobQueue()
    queue.put(waiting("small", created=2.0))
    queue.put(waiting("large", wafers=2, created=1.0))
    assert admitted(queue, nodes) == []  # the wafer that is free does not go to the younger
    status = queue.status(nodes).get("small")
    assert status is not None
    assert (status.position, status.waiting_for) == (2, "its turn, after large")
    queue.set_priority("small", 1)
    assert admitted(queue, nodes) == ["small"]


def test_an_impossible_job_is_in_nobodys_way() -> None:
    nodes = cluster(wafer=2, worker=2, memoryx=2, swarmx=2)
    queue = JobQueue()
    queue.put(waiting("too large", wafers=3, priority=1))
    queue.put(waiting("small"))
    assert admitted(queue, nodes) == ["small"]
    assert [one.job for one in queue.impossible(nodes)] == ["too large"]
    assert refusal(wanted(3), Inventory(nodes), "h:1") == (
        "the job needs 3 wafers, and 1 is free (1 wafer works for small); "
        "to add one: python -m wafer --management h:1; "
        "the job needs 3 input workers, and 1 is free (1 input worker works for small); "
        "to add one: python -m workers --management h:1"
    )


def preempted(job: str, nodes: list[management_pb2.NodeInfo], created: float = 0.0) -> Waiting:
    """Takes the nodes of a job, which waits for as many; those of MemoryX must be on the same hosts."""
    asked = management_pb2.Acquire(num_wafers=1, num_workers_per_wafer=1)
    for node in nodes:
        if node.job == job:
            asked.former.add().CopyFrom(node)
            node.job = node.member = ""
    asked.bound.extend(node.member for node in asked.former if node.role == ROLES["memoryx"])
    return Waiting(job=job, wanted=asked, priority=2, created=created)


def test_a_preempted_job_gets_as_many_nodes_as_it_had_with_its_states_where_they_were() -> None:
    nodes = cluster(wafer=2, worker=2, memoryx=3, swarmx=1)
    for node in nodes:
        node.host = f"host-{node.node_id[-1]}"
        node.address = f"{node.host}:7000"
    assert lease("one", wanted(shards=2), Inventory(nodes))
    queue = JobQueue()
    queue.put(preempted("one", nodes))
    other = nodes[[node.node_id for node in nodes].index("memoryx1")]
    other.job, other.member = "two", "memoryx-0"
    assert admitted(queue, nodes) == []  # two nodes of MemoryX are free, and one is on the wrong host
    status = queue.status(nodes)["one"]
    assert status.waiting_for == "memoryx-1 on the host of host-1:7000, whose disk has its states"
    other.job = other.member = ""
    assert admitted(queue, nodes) == ["one"]
    shards = {node.member: node.node_id for node in nodes if node.member.startswith("memoryx")}
    assert shards == {"memoryx-0": "memoryx0", "memoryx-1": "memoryx1"}
    returned = preempted("one", nodes)
    queue.put(returned)
    nodes.remove(other)
    assert [each.job for each in queue.impossible(nodes)] == ["one"]
    assert refusal(returned.wanted, Inventory(nodes), "h:1") == (
        "the job needs memoryx-1 on the host of host-1:7000, whose disk has its states; "
        "to add one: python -m memoryx --management h:1"
    )


def test_the_next_job_names_the_nodes_for_which_idle_jobs_are_preempted() -> None:
    queue = JobQueue()
    nodes = cluster(wafer=3, worker=3, memoryx=3, swarmx=3)
    assert lease("one", wanted(2), Inventory(nodes))
    queue.put(waiting("too large", wafers=4, priority=1))
    queue.put(waiting("large", wafers=2, created=1.0))
    queue.put(waiting("small", created=2.0))
    assert queue.lacking(nodes) == {ROLES["wafer"]: 1, ROLES["worker"]: 1}


ACTION = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 9), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("preempt"), st.integers(0, 9)),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("priority"), st.integers(0, 9), st.integers(1, 3)),
    st.tuples(st.just("node dies"), st.integers(0, 20)),
)


@settings(max_examples=100)
@given(st.lists(ACTION, max_size=40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_no_node_has_two_holders_and_the_order_is_kept(
    actions: list[tuple[object, ...]], wafers: int, memoryx: int, swarmx: int
) -> None:
    nodes = cluster(wafer=wafers, worker=wafers, memoryx=memoryx, swarmx=swarmx)
    for index, node in enumerate(nodes):
        node.host = f"host-{index % 2}"
    queue = JobQueue()
    running: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}  # of preempted jobs, in nodes
    for time, (kind, number, *more) in enumerate(actions):
        job = f"job-{number}"
        if kind == "put" and job not in running and queue.status(nodes).get(job) is None:
            queue.put(waiting(job, wafers=more[0], priority=more[1], created=time))  # type: ignore[arg-type]
        elif kind == "end" and running.pop(job, None) is not None:
            for node in nodes:
                if node.job == job:
                    node.job = node.member = ""
        elif kind == "preempt" and running.get(job) and running[job] <= {node.node_id for node in nodes}:
            former = running.pop(job)
            queue.put(preempted(job, nodes, created=time))
            sizes[job] = len(former)
        elif kind == "leave":
            queue.remove(job)
        elif kind == "priority":
            queue.set_priority(job, more[0])  # type: ignore[arg-type]
        elif kind == "node dies" and nodes:
            del nodes[number % len(nodes)]  # type: ignore[operator]
        before = queue.ordered()
        able = [one for one in before if possible(one.wanted, Inventory(nodes))]
        admissions = queue.admit(nodes)
        # Whoever is admitted comes before whoever could be, but is not.
        assert [admission.job for admission in admissions] == [one.job for one in able[: len(admissions)]]
        for admission in admissions:
            running[admission.job] = {node.node_id for node in admission.nodes}
            assert len(admission.nodes) == sizes.pop(admission.job, len(admission.nodes))
        held = [node_id for holder in running.values() for node_id in holder]
        assert len(held) == len(set(held))
        there = {node.node_id for node in nodes}
        for name, holder in running.items():
            assert {node.node_id for node in nodes if node.job == name} == holder & there
        # Nobody waits who is next and lacks nothing.
        rest = able[len(admissions) :]
        if rest:
            assert waiting_for(rest[0].job, rest[0].wanted, Inventory(nodes))[0]
        assert [one.job for one in queue.ordered()] == [one.job for one in before if one.job not in running]
