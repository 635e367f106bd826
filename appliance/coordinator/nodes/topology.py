"""The members of a job, and the links between them."""

import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from waferbox import roles
from waferbox.runtime.swarmx_trees import SwarmXTree, swarmx_trees, trees_by_shard
from wsc.v1 import management_pb2, node_pb2

COORDINATOR = roles.COORDINATOR.name

_Purpose: TypeAlias = "node_pb2.LinkPurpose.ValueType"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node as a member of the job."""

    name: str  # such as "wafer-0"
    role: "node_pb2.Role.ValueType"
    index: int  # among the members of its role; worker w * num_workers_per_wafer + k is worker k of wafer w
    node: management_pb2.NodeInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All members of a job, and the SwarmX trees over its wafers. members() is in the order of set-up.

    The trees stay as they are when nodes are replaced, also by nodes of other hosts, so that the sums stay the same.

    A single wafer has no trees; in layer pipelined mode the members are a wafer and its workers.
    """

    memoryx: tuple[Member, ...]
    swarmx: tuple[Member, ...]
    wafers: tuple[Member, ...]
    workers: tuple[Member, ...]
    trees: tuple[SwarmXTree, ...]
    hosts: Mapping[str, str]  # of members when the job first got nodes; others are where their node is
    num_workers_per_wafer: int

    @classmethod
    def build(
        cls,
        nodes: Iterable[management_pb2.NodeInfo],
        num_workers_per_wafer: int,
        hosts: Mapping[str, str] = MappingProxyType({}),
    ) -> "Topology":
        """Returns the topology of these nodes, with the trees of the hosts.

        Args:
            nodes: those of the job, by role in the order of their indices.
            num_workers_per_wafer: number of input workers of a wafer.
            hosts: of members when the job first got nodes; none: as the nodes are.
        """
        by_role: dict[int, list[management_pb2.NodeInfo]] = defaultdict(list)
        for node in nodes:
            by_role[node.role].append(node)

        def members(role: "node_pb2.Role.ValueType") -> tuple[Member, ...]:
            # A job that has lost wafers may have given back SwarmX nodes: the others keep their names.
            indices = [roles.member_index(node.member) if node.member else i for i, node in enumerate(by_role[role])]
            return tuple(
                Member(name=roles.role_of(role).member_name(index), role=role, index=index, node=node)
                for index, node in zip(indices, by_role[role], strict=True)
            )

        topology = cls(
            memoryx=members(node_pb2.ROLE_MEMORYX),
            swarmx=members(node_pb2.ROLE_SWARMX),
            wafers=members(node_pb2.ROLE_WAFER),
            workers=members(node_pb2.ROLE_WORKER),
            trees=(),
            hosts=hosts,
            num_workers_per_wafer=num_workers_per_wafer,
        )
        return topology._with_trees() if topology.memoryx else topology

    def with_nodes(self, nodes: Iterable[management_pb2.NodeInfo], attached: Collection[str]) -> "Topology":
        """Returns the same topology with these nodes, each at the member that it names.

        Attached members stay as they are while they have the same node. The others get a new lease in any case: the
        node may have worked for another job meanwhile, and accepts no earlier one.
        """
        by_name = {node.member: node for node in nodes}

        def renewed(members: tuple[Member, ...]) -> tuple[Member, ...]:
            return tuple(
                member
                if _is_same(node := by_name.get(member.name, member.node), member.node) and member.name in attached
                else replace(member, node=node)
                for member in members
            )

        return replace(
            self,
            memoryx=renewed(self.memoryx),
            swarmx=renewed(self.swarmx),
            wafers=renewed(self.wafers),
            workers=renewed(self.workers),
        )

    def reduced(self, num_wafers: int, dead: Collection[str]) -> "Topology":
        """Returns a topology of fewer wafers, with living members moved to the indices of dead ones.

        dead: names of wafers and workers; enough others must be left.
        """

        def filled(members: tuple[Member, ...], count: int) -> tuple[Member, ...]:
            others = (member for member in members[count:] if member.name not in dead)
            return tuple(
                member if member.name not in dead else _moved(next(others), member) for member in members[:count]
            )

        reduced = replace(
            self,
            wafers=filled(self.wafers, num_wafers),
            workers=filled(self.workers, num_wafers * self.num_workers_per_wafer),
        )
        return reduced._with_trees()

    def _with_trees(self) -> "Topology":
        """Returns the members with the trees of their hosts, without SwarmX nodes that are in no tree."""
        wafers, swarmx, shards = (
            {member.name: self.hosts.get(member.name, member.node.host) for member in role}
            for role in (self.wafers, self.swarmx, self.memoryx)
        )
        trees = swarmx_trees(wafers, swarmx, list(shards.values()))
        used = {node.name for tree in trees for node in tree.nodes}
        return replace(self, swarmx=tuple(member for member in self.swarmx if member.name in used), trees=trees)

    @property
    def trees_by_shard(self) -> Sequence[int]:
        """The number of each shard's tree; empty if there is one tree or none."""
        return trees_by_shard(self.trees) if len(self.trees) > 1 else ()

    def members(self) -> Sequence[Member]:
        return [*self.memoryx, *self.swarmx, *self.wafers, *self.workers]

    @property
    def state_keepers(self) -> Sequence[Member]:
        """The members that keep the states of the job, by shard."""
        return self.memoryx or self.wafers[:1]

    def links(self, endpoints: Mapping[str, node_pb2.LinkEndpoint]) -> dict[str, list[node_pb2.LinkSpec]]:
        """Returns the links of one execution, by the name of the node that gets them, with fresh tokens.

        endpoints: of every member and of the coordinator, by name. The coordinator always waits to be dialled.
        """
        specs: dict[str, list[node_pb2.LinkSpec]] = defaultdict(list)

        def connect(
            dialer: str, purpose: _Purpose, index: int, waiter: str, its_purpose: _Purpose, its_index: int
        ) -> None:
            """Adds a link. purpose and index: as the dialer sees it; its_...: as the other side sees it."""
            token = secrets.token_hex(16)
            specs[dialer].append(
                node_pb2.LinkSpec(
                    token=token, peer=waiter, endpoint=endpoints[waiter], dial=True, purpose=purpose, index=index
                )
            )
            specs[waiter].append(
                node_pb2.LinkSpec(token=token, peer=dialer, dial=False, purpose=its_purpose, index=its_index)
            )

        for worker in self.workers:
            wafer, number = divmod(worker.index, self.num_workers_per_wafer)
            connect(
                worker.name,
                node_pb2.LINK_PURPOSE_WAFER,
                0,
                self.wafers[wafer].name,
                node_pb2.LINK_PURPOSE_WORKER,
                number,
            )
        for shard in self.memoryx:
            for other in self.memoryx[shard.index + 1 :]:
                connect(
                    other.name,
                    node_pb2.LINK_PURPOSE_SHARD,
                    shard.index,
                    shard.name,
                    node_pb2.LINK_PURPOSE_SHARD,
                    other.index,
                )
        num_children: dict[str, int] = defaultdict(int)  # by node, of all its trees
        for number, tree in enumerate(self.trees):
            root = tree.root.name
            # Tree 0 carries what shards of several trees receive.
            for index in tree.shards if number else range(len(self.memoryx)):
                name = self.memoryx[index].name
                connect(root, node_pb2.LINK_PURPOSE_SHARD, index, name, node_pb2.LINK_PURPOSE_SWARMX, number)
            for node in tree.nodes:
                for child, wafers in zip(node.children, node.wafers_below, strict=True):
                    position = num_children[node.name]
                    num_children[node.name] += 1
                    connect(
                        child, node_pb2.LINK_PURPOSE_PARENT, number, node.name, node_pb2.LINK_PURPOSE_CHILD, position
                    )
                    spec = specs[node.name][-1]
                    spec.tree, spec.num_wafers, spec.first_wafer = number, wafers, node.first_wafer
        if self.trees:
            connect(
                self.trees[0].root.name,
                node_pb2.LINK_PURPOSE_COORDINATOR,
                0,
                COORDINATOR,
                node_pb2.LINK_PURPOSE_SWARMX,
                0,
            )
        else:
            single = self.wafers[0].name
            for shard in self.memoryx:
                connect(single, node_pb2.LINK_PURPOSE_SHARD, shard.index, shard.name, node_pb2.LINK_PURPOSE_WAFER, 0)
            connect(single, node_pb2.LINK_PURPOSE_COORDINATOR, 0, COORDINATOR, node_pb2.LINK_PURPOSE_WAFER, 0)
        if self.memoryx:
            shard_0 = self.memoryx[0].name
            connect(shard_0, node_pb2.LINK_PURPOSE_COORDINATOR, 0, COORDINATOR, node_pb2.LINK_PURPOSE_SHARD, 0)
        return dict(specs)


def _is_same(one: management_pb2.NodeInfo, other: management_pb2.NodeInfo) -> bool:
    """Whether both are one registration: a restarted management service numbers nodes from 0 again."""
    return (one.node_id, one.instance) == (other.node_id, other.instance)


def _moved(member: Member, lost: Member) -> Member:
    """Returns a member with the name and index of another."""
    node = management_pb2.NodeInfo()
    node.CopyFrom(member.node)
    node.member = lost.name
    return replace(lost, node=node)
