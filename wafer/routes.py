"""The links of a wafer towards MemoryX: where groups come from, where they go, and how both are bounded.

They lead to the wafer's parents in the SwarmX trees or, for a job's single wafer, to the shards and the coordinator.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from waferbox.links.hub import Hub
from waferbox.links.link import Link
from waferbox.links.shared_memory import Slice
from waferbox.runtime.arena import RELEASED_GROUP, ArenaCounts
from waferbox.runtime.node_job import LinkKey
from waferbox.runtime.schedule import CREDIT_GROUPS, WEIGHTS_CREDIT_BATCH, is_received_by_wafers
from waferbox.runtime.swarmx_trees import tree_of
from wsc.v1 import node_pb2, plan_pb2


class Routes:
    """The links of one wafer, by the groups that they carry. Used by one thread."""

    def __init__(self, links: Mapping[LinkKey, Link], trees: Sequence[int]) -> None:
        """Raises ValueError: no link leads to MemoryX.

        Args:
            links: of the wafer.
            trees: the number of each shard's SwarmX tree; empty: there is one tree, or none.
        """
        self._trees = trees
        parent, shard = node_pb2.LINK_PURPOSE_PARENT, node_pb2.LINK_PURPOSE_SHARD
        self._parents = {tree: link for (purpose, tree), link in links.items() if purpose == parent}
        self._shards = {index: link for (purpose, index), link in links.items() if purpose == shard}
        self._coordinator = links.get((node_pb2.LINK_PURPOSE_COORDINATOR, 0))
        if not self._parents and not self._shards:
            raise ValueError("a wafer has a link to a SwarmX node, or to each shard")

    def source(self, group: plan_pb2.Group) -> Link | None:
        """Returns the link that brings a group of MemoryX or SwarmX; None: a single wafer has what it would reduce."""
        if self._parents:
            return self._parents[tree_of(group, self._trees)]
        return self._shards[group.source_shard] if group.kind == plan_pb2.GROUP_KIND_WEIGHTS else None

    def targets(self, group: plan_pb2.Group) -> Sequence[Link]:
        """Returns the links over which a group is sent in each step in which it travels."""
        if self._parents:
            return [self._parents[tree_of(group, self._trees)]]
        return [self._shards[shard] for shard in group.shards]

    def coordinator(self, group: plan_pb2.Group) -> Link | None:
        """Returns the link over which a group is sent to the coordinator; None: it does not go there, or by SwarmX."""
        return self._coordinator if group.to_coordinator else None

    def expect(self, groups: Iterable[plan_pb2.Group]) -> None:
        """Makes the links accept the groups that they bring, and no others."""
        sizes: dict[Link, dict[int, int]] = {
            link: {RELEASED_GROUP: 0} for link in (*self._parents.values(), *self._shards.values())
        }
        for group in groups:
            if is_received_by_wafers(group) and (link := self.source(group)) is not None:
                sizes[link][group.id] = group.nbytes
        for link, its_sizes in sizes.items():
            link.expect(its_sizes)
        if self._coordinator is not None:
            self._coordinator.expect({})

    def limit_ahead(self, steps: int) -> None:
        """Bounds the steps whose outputs the coordinator has not acknowledged."""
        if self._coordinator is not None:
            self._coordinator.limit_ahead(steps)

    def first_counts(self, counts: ArenaCounts, groups: Iterable[plan_pb2.Group]) -> dict[Link, int]:
        """Returns the links that bring the counts of released groups, with the count of each at first."""
        if self._parents:
            return {self._parents[tree_of(group, self._trees)]: 0 for group in groups if group.id in counts.offsets}
        return {self._shards[shard]: count for shard, count in counts.first_counts(groups).items()}

    def granting(self, shard: int, hub: Hub, nothing: Slice) -> Callable[[int], None]:
        """Returns a call that lets a shard send a batch of weights groups, given the number of those taken so far.

        nothing: a payload without bytes.
        """
        if not self._parents:
            link = self._shards[shard]
            return lambda taken: link.grant(WEIGHTS_CREDIT_BATCH)
        parent = self._parents[self._trees[shard] if self._trees else 0]
        return lambda taken: hub.send(parent, CREDIT_GROUPS + shard, taken, nothing)
