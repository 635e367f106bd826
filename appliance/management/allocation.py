"""Which nodes a job gets, and what it says that a job lacks. Pure: nodes come in as what is known of them.

A job needs its wafers, its input workers, one MemoryX node and one SwarmX node. Of MemoryX and SwarmX it may use more:
its share, which is to the nodes of the role as its wafers are to those of the cluster, so that jobs on the other wafers
find some too.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from appliance.members import PACKAGES, counted, member_name
from interconnect.swarmx_tree import tree_size
from wsc.v1 import management_pb2, node_pb2

_Role: TypeAlias = "node_pb2.Role.ValueType"


def lease(
    job: str, wanted: management_pb2.Acquire, nodes: Iterable[management_pb2.NodeInfo]
) -> Sequence[management_pb2.NodeInfo] | None:
    """Mark free nodes as the job's, all that it needs or none (then None); returns them, named as its members.

    MemoryX: max_shards where that is set, else the job's share, of what is free. SwarmX: a whole tree if the share is
    enough for one, else one node.
    """
    by_role = _by_role(nodes)
    chosen: list[tuple[management_pb2.NodeInfo, str]] = []
    for role, least in _needs(wanted):
        free = _free(by_role[role])
        if len(free) < least:
            return None
        count = least
        share = max(1, len(by_role[role]) * wanted.num_wafers // max(1, len(by_role[node_pb2.ROLE_WAFER])))
        if role == node_pb2.ROLE_MEMORYX:
            count = min(len(free), wanted.max_shards or share)
        elif role == node_pb2.ROLE_SWARMX and min(len(free), share) >= tree_size(wanted.num_wafers):
            count = tree_size(wanted.num_wafers)
        chosen += [(node, member_name(role, index)) for index, node in enumerate(free[:count])]
    for node, member in chosen:
        node.job, node.member = job, member
    return [node for node, _ in chosen]


def possible(wanted: management_pb2.Acquire, nodes: Iterable[management_pb2.NodeInfo]) -> bool:
    """Whether the job could have what it needs if no other job had anything."""
    by_role = _by_role(nodes)
    return all(len(by_role[role]) >= least for role, least in _needs(wanted))


def waiting_for(wanted: management_pb2.Acquire, nodes: Iterable[management_pb2.NodeInfo]) -> str:
    """What the job lacks and who has it, such as "1 wafer, held by job-1f2e"; empty if it lacks nothing."""
    by_role = _by_role(nodes)
    texts = []
    for role, least in _needs(wanted):
        lacking = least - len(_free(by_role[role]))
        if lacking > 0:
            holders = _holders(by_role[role])
            texts.append(counted(lacking, role) + (f", held by {holders}" if holders else ", not in the cluster"))
    return "; ".join(texts)


def refusal(wanted: management_pb2.Acquire, nodes: Iterable[management_pb2.NodeInfo], management: str) -> str:
    """What the cluster, as it is, can never give the job, and how to add it."""
    by_role = _by_role(nodes)
    problems = []
    for role, least in _needs(wanted):
        missing = least - len(by_role[role])
        if missing <= 0:
            continue
        free = len(_free(by_role[role]))
        problem = f"the job needs {counted(least, role)}, and {free or 'none'} {'is' if free <= 1 else 'are'} free"
        busy = len(by_role[role]) - free
        if busy:
            verb = "works" if busy == 1 else "work"
            problem += f" ({counted(busy, role)} {verb} for {_holders(by_role[role])})"
        each = "one" if missing == 1 else f"{missing}, each"
        problems.append(f"{problem}; to add {each}: python -m {PACKAGES[role]} --management {management}")
    return "; ".join(problems)


def _needs(wanted: management_pb2.Acquire) -> Iterable[tuple[_Role, int]]:
    """The least number of each role."""
    yield node_pb2.ROLE_WAFER, wanted.num_wafers
    yield node_pb2.ROLE_WORKER, wanted.num_wafers * wanted.num_workers_per_wafer
    yield node_pb2.ROLE_MEMORYX, 1
    yield node_pb2.ROLE_SWARMX, 1


def _by_role(nodes: Iterable[management_pb2.NodeInfo]) -> Mapping[_Role, Sequence[management_pb2.NodeInfo]]:
    sorted_nodes: dict[_Role, list[management_pb2.NodeInfo]] = {role: [] for role in PACKAGES}
    for node in nodes:
        sorted_nodes[node.role].append(node)
    return sorted_nodes


def _free(nodes: Iterable[management_pb2.NodeInfo]) -> list[management_pb2.NodeInfo]:
    return [node for node in nodes if not node.job]


def _holders(nodes: Iterable[management_pb2.NodeInfo]) -> str:
    return ", ".join(sorted({node.job for node in nodes if node.job}))
