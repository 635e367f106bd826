"""The allocation of nodes to jobs, and the description of nodes that a job lacks. Pure functions of the known nodes.

A job needs its wafers, its input workers, one MemoryX node and, for several wafers, one SwarmX node; in layer pipelined
mode only wafers and workers. It may use more MemoryX and SwarmX nodes, up to its share: the part of them that
corresponds to its part of the cluster's wafers, so that jobs on the other wafers find some too. A single wafer uses no
SwarmX node. A preempted job needs as many nodes of each role as it had, and those that keep its states on their former
hosts.

A job gets wafers of as few hosts as possible, and its other nodes on the hosts of its wafers, as far as they are free:
its workers beside their wafers, its shards and SwarmX nodes spread over the hosts.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice
from typing import TypeAlias

from waferbox.roles import role_of
from waferbox.runtime.swarmx_trees import tree_size
from wsc.v1 import management_pb2, node_pb2, plan_pb2

_Role: TypeAlias = "node_pb2.Role.ValueType"


class Inventory:
    """The nodes by role: their number, their holders, and the free ones. `lease` updates it."""

    def __init__(self, nodes: Iterable[management_pb2.NodeInfo]) -> None:
        self.totals: Counter[_Role] = Counter()
        self._totals_at: Counter[tuple[_Role, str]] = Counter()
        self.free: defaultdict[_Role, list[management_pb2.NodeInfo]] = defaultdict(list)
        self._holders: defaultdict[_Role, set[str]] = defaultdict(set)
        for node in nodes:
            self.totals[node.role] += 1
            self._totals_at[node.role, node.host] += 1
            if node.job:
                self._holders[node.role].add(node.job)
            else:
                self.free[node.role].append(node)

    def total_at(self, role: _Role, host: str) -> int:
        """Returns the number of nodes of a role on a host."""
        return self._totals_at[role, host]

    def free_at(self, role: _Role, host: str) -> int:
        """Returns the number of free nodes of a role on a host."""
        return sum(node.host == host for node in self.free[role])

    def holders(self, role: _Role, *, besides: str = "") -> Sequence[str]:
        """Returns the names of other jobs that hold nodes of a role, in order."""
        return sorted(self._holders[role] - {besides})

    def take(self, role: _Role, job: str, host: str = "") -> management_pb2.NodeInfo:
        """Leases the first free node of a role to the job: on this host if one is free there, else on any."""
        node = next((node for node in self.free[role] if node.host == host), self.free[role][0])
        self.free[role].remove(node)
        self._holders[role].add(job)
        return node


def lease(job: str, wanted: management_pb2.Acquire, inventory: Inventory) -> Sequence[management_pb2.NodeInfo] | None:
    """Leases all nodes that the job needs, named as its members; None if there are too few.

    MemoryX: max_shards if that is set, else the job's share, as far as nodes are free. SwarmX: on one host a whole tree
    if the share is enough for one, else one node; over several hosts one for each, as far as the share goes.
    """
    if wanted.former:
        return _lease_again(job, wanted, inventory)
    if lacking(wanted, inventory):
        return None
    chosen: list[management_pb2.NodeInfo] = []

    def take(role: _Role, hosts: Iterable[str]) -> None:
        for index, host in enumerate(hosts):
            node = inventory.take(role, job, host)
            node.job, node.member = job, role_of(role).member_name(index)
            chosen.append(node)

    def share(role: _Role, asked: int = 0) -> int:
        part = inventory.totals[role] * wanted.num_wafers // max(1, inventory.totals[node_pb2.ROLE_WAFER])
        return min(len(inventory.free[role]), asked or max(1, part))

    hosts = _hosts_of_wafers([node.host for node in inventory.free[node_pb2.ROLE_WAFER]], wanted.num_wafers)
    take(node_pb2.ROLE_WAFER, hosts)
    take(node_pb2.ROLE_WORKER, [host for host in hosts for _ in range(wanted.num_workers_per_wafer)])
    if wanted.execution_strategy == plan_pb2.EXECUTION_STRATEGY_PIPELINE:
        return chosen
    in_turn = list(dict.fromkeys(hosts))
    take(node_pb2.ROLE_MEMORYX, islice(cycle(in_turn), share(node_pb2.ROLE_MEMORYX, wanted.max_shards)))
    own, size = share(node_pb2.ROLE_SWARMX), tree_size(wanted.num_wafers)
    on_one_host = size if own >= size else 1
    count = min(own, max(len(in_turn), size)) if len(in_turn) > 1 else on_one_host
    take(node_pb2.ROLE_SWARMX, islice(cycle(in_turn), count))
    return chosen


def _hosts_of_wafers(free: Sequence[str], count: int) -> list[str]:
    """Returns the hosts of a job's wafers, in order: the smallest host with enough free ones, or few large ones.

    Args:
        free: the host of each free wafer.
        count: of the job's wafers.
    """
    at_host = Counter(free)
    large_enough = [host for host, wafers in at_host.items() if wafers >= count]
    if large_enough:
        return [min(large_enough, key=lambda host: at_host[host])] * count
    return [host for host, wafers in at_host.most_common() for _ in range(wafers)][:count]


def _lease_again(
    job: str, wanted: management_pb2.Acquire, inventory: Inventory
) -> Sequence[management_pb2.NodeInfo] | None:
    """Leases nodes to a preempted job, as the members that it had; None if there are too few."""
    if lacking(wanted, inventory) or _without_place(wanted, inventory.free_at):
        return None
    chosen: list[management_pb2.NodeInfo] = []
    for former in sorted(wanted.former, key=lambda node: node.member not in wanted.bound):  # those with a host first
        node = inventory.take(former.role, job, former.host)
        node.job, node.member = job, former.member
        chosen.append(node)
    return chosen


def possible(wanted: management_pb2.Acquire, inventory: Inventory) -> bool:
    """Whether the cluster has the nodes that the job needs, if no other job held any."""
    has_all = all(inventory.totals[role] >= least for role, least in _needs(wanted))
    return has_all and not _without_place(wanted, inventory.total_at)


def lacking(wanted: management_pb2.Acquire, inventory: Inventory) -> Mapping[_Role, int]:
    """Returns how many nodes of each role the job lacks; only roles of which it lacks some."""
    missing = {role: least - len(inventory.free[role]) for role, least in _needs(wanted)}
    return {role: count for role, count in missing.items() if count > 0}


def waiting_for(job: str, wanted: management_pb2.Acquire, inventory: Inventory) -> tuple[str, Sequence[str]]:
    """Describes the nodes that the job lacks and their holders, such as "1 wafer, held by job-1f2e"; empty if none.

    The job itself may hold some of them: it waits again while its former nodes still release it.

    Returns:
        The text, and the names of the holders in it.
    """
    texts: list[str] = []
    named: dict[str, None] = {}
    lacks = lacking(wanted, inventory)
    for role, count in lacks.items():
        holders = inventory.holders(role, besides=job)
        places = [f"held by {', '.join(holders)}"] if holders else []
        if job in inventory.holders(role):
            places.append("given back by this job just now")
        texts.append(f"{role_of(role).counted(count)}, {' and '.join(places) or 'not in the cluster'}")
        named.update(dict.fromkeys(holders))
    texts.extend(_at_its_host(node) for node in _without_place(wanted, inventory.free_at) if node.role not in lacks)
    return "; ".join(texts), list(named)


def refusal(wanted: management_pb2.Acquire, inventory: Inventory, management: str) -> str:
    """Describes the nodes that the cluster lacks for the job, and how to add them."""
    problems = []
    for role, least in _needs(wanted):
        missing = least - inventory.totals[role]
        if missing <= 0:
            continue
        free = len(inventory.free[role])
        problem = (
            f"the job needs {role_of(role).counted(least)}, and {free or 'none'} {'is' if free <= 1 else 'are'} free"
        )
        busy = inventory.totals[role] - free
        if busy:
            verb = "works" if busy == 1 else "work"
            problem += f" ({role_of(role).counted(busy)} {verb} for {', '.join(inventory.holders(role))})"
        problems.append(f"{problem}; {how_to_add(missing, role, management)}")
    for node in _without_place(wanted, inventory.total_at):
        problems.append(f"the job needs {_at_its_host(node)}; {how_to_add(1, node.role, management)}")
    return "; ".join(problems)


def how_to_add(count: int, role: _Role, management: str) -> str:
    """Returns the command that adds nodes of a role to a management service's cluster."""
    each = "one" if count == 1 else f"{count}, each"
    return f"to add {each}: python -m {role_of(role).module} --management {management}"


def _needs(wanted: management_pb2.Acquire) -> Iterable[tuple[_Role, int]]:
    """Returns the least number of nodes of each role."""
    if wanted.former:
        yield from Counter(node.role for node in wanted.former).items()
        return
    yield node_pb2.ROLE_WAFER, wanted.num_wafers
    yield node_pb2.ROLE_WORKER, wanted.num_wafers * wanted.num_workers_per_wafer
    if wanted.execution_strategy != plan_pb2.EXECUTION_STRATEGY_PIPELINE:
        yield node_pb2.ROLE_MEMORYX, 1
        if wanted.num_wafers > 1:
            yield node_pb2.ROLE_SWARMX, 1


def _without_place(
    wanted: management_pb2.Acquire, available: Callable[[_Role, str], int]
) -> Sequence[management_pb2.NodeInfo]:
    """Returns the former nodes that must be on their hosts again, and for which none is available there.

    available: returns the number of nodes of a role on a host.
    """
    bound: dict[tuple[_Role, str], list[management_pb2.NodeInfo]] = defaultdict(list)
    for node in wanted.former:
        if node.member in wanted.bound:
            bound[node.role, node.host].append(node)
    return [node for place, nodes in bound.items() for node in nodes[available(*place) :]]


def _at_its_host(node: management_pb2.NodeInfo) -> str:
    return f"{node.member} on the host of {node.address}, whose disk has its states"
