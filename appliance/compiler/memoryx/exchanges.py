"""What travels between MemoryX's shards, and from shard 0 to the client."""

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.ir import SSAValue

from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import Bundle, Numbers
from appliance.compiler.partition.shards import Sharing, elements
from cirh.dialect import types
from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Groups of values that one shard makes and others read, in the order in which all shards take them."""

    bundles: Sequence[Bundle]

    def from_shard(self, shard: int) -> list[Bundle]:
        return [bundle for bundle in self.bundles if bundle.group.source_shard == shard]

    def to_shard(self, shard: int) -> list[Bundle]:
        return [bundle for bundle in self.bundles if shard in bundle.group.shards]


def find_exchanges(cut: Cut, sharing: Sharing, numbers: Numbers) -> Exchanges:
    """Groups by source, destinations and depth: how many exchanges a value depends on, one after the other.

    Numbers are exchanged that other shards read, and whatever the client gets and shard 0 does not have. What something
    streamed to the wafers is made of travels alone: everybody may wait for it.
    """
    outputs = {value for _, value in cut.outputs}
    urgent = _behind_streamed(cut)
    depth: dict[SSAValue, int] = {}
    found: dict[tuple[int, int, tuple[int, ...], int], Bundle] = {}
    sent: set[SSAValue] = set()

    def offer(value: SSAValue) -> None:
        home = sharing.home.get(value)
        if home is None or value in cut.sharding.reduced:
            return
        others = [shard for shard in range(sharing.num_shards) if shard != home]
        readers = [
            shard
            for shard in others
            if (elements(value) == 1 and sharing.reads(shard, value)) or (shard == 0 and value in outputs)
        ]
        if not readers:
            return
        sent.add(value)
        key = (depth.get(value, 0), home, tuple(readers), numbers.value(value) if value in urgent else 0)
        if key not in found:
            kind = plan_pb2.GROUP_KIND_EXCHANGE
            found[key] = Bundle(plan_pb2.Group(id=numbers.group(), kind=kind, source_shard=home, shards=readers))
        found[key].add(numbers, value, types.tensor_type(types.shape(value), types.dtype(value)))

    for states in sharing.states:
        for state in states:
            if state in outputs and state not in sent:
                offer(state)
    for op in cut.memoryx_ops:
        mine = sharing.home.get(op.results[0])
        level = 0
        for operand in op.operands:
            crosses = operand in sent and sharing.home.get(operand) != mine
            level = max(level, depth.get(operand, 0) + crosses)
        for value in op.results:
            depth[value] = level
            offer(value)
    return Exchanges([found[key] for key in sorted(found)])


def _behind_streamed(cut: Cut) -> set[SSAValue]:
    """All values that something streamed is made of."""
    behind = set(cut.streamed)
    for op in reversed(cut.memoryx_ops):
        if any(result in behind for result in op.results):
            behind.update(op.operands)
    return behind


def find_output(cut: Cut, numbers: Numbers) -> Bundle | None:
    """The group of what shard 0 sends to the client."""
    bundle = Bundle(plan_pb2.Group(kind=plan_pb2.GROUP_KIND_OUTPUT))
    for _, value in cut.outputs:
        if value not in cut.sharding.reduced and not cut.sharding.used(value).is_sharded and value not in bundle.values:
            bundle.add(numbers, value, types.tensor_type(types.shape(value), types.dtype(value)))
    if not bundle.values:
        return None
    bundle.group.id = numbers.group()
    return bundle
