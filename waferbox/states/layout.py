"""Where states, and the weights groups of a plan, lie in the memory or file that they are in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from waferbox.links.elements import aligned, tensor_bytes
from wsc.v1 import plan_pb2

# --- Where a state lies in the memory or the file that it is in, and what it is ---------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateExtent:
    """One state's place in a piece of memory, or in a file."""

    offset: int
    element_type: "plan_pb2.ElementType.ValueType"
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def at(cls, offset: int, tensor_type: plan_pb2.TensorType) -> "StateExtent":
        return cls(
            offset=offset,
            element_type=tensor_type.element_type,
            shape=tuple(tensor_type.shape),
            nbytes=tensor_bytes(tensor_type),
        )

    def holds(self, tensor_type: plan_pb2.TensorType) -> bool:
        return self.element_type == tensor_type.element_type and self.shape == tuple(tensor_type.shape)

    def is_like(self, other: "StateExtent") -> bool:
        """Whether a state of the same type lies at the other place."""
        return self.element_type == other.element_type and self.shape == other.shape

    def moved_to(self, offset: int) -> "StateExtent":
        """The same state at another place."""
        return replace(self, offset=offset)


# ----------------------------------------------------------------------------------------------------------------------
# Where the states of a job, and the weights groups of a plan, lie in the shared memory that the wafers map
#
# A weights group is sent in place, so its members lie together, in the order and at the offsets of the plan. A state
# that
# belongs to several groups lies in the first; the later ones are either found to lie there as well, or have a copy.


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    places: Mapping[str, StateExtent]
    group_bases: Mapping[int, int]  # weights group -> where its buffer begins
    nbytes: int


def lay_out(plan: plan_pb2.MemoryXPlan, kept: Mapping[str, StateExtent]) -> Layout:
    """A new layout for the plan's states; the kept ones that the plan does not name lie behind them."""
    names = {slot.value: slot for slot in plan.states}
    places: dict[str, StateExtent] = {}
    bases: dict[int, int] = {}
    end = 0
    for group in weights_groups(plan):
        base = _base_in(group, names, places)
        if base is None:
            base = end
            for member in group.members:
                slot = names.get(member.value)
                if slot is not None and slot.name not in places:
                    places[slot.name] = StateExtent.at(base + member.offset, slot.type)
        end = max(end, aligned(base + group.nbytes))
        bases[group.id] = base
    rest: list[tuple[str, plan_pb2.TensorType]] = [(slot.name, slot.type) for slot in plan.states]
    named = {name for name, _ in rest}
    rest += [(name, _type_of(place)) for name, place in kept.items() if name not in named]
    for name, tensor_type in rest:
        if name not in places:
            places[name] = StateExtent.at(end, tensor_type)
            end = aligned(end + places[name].nbytes)
    return Layout(places=places, group_bases=bases, nbytes=max(end, 1))


def fit(plan: plan_pb2.MemoryXPlan, layout: Layout) -> Layout | None:
    """The layout with the plan's groups in it, if its states lie there already as the plan wants them; else None."""
    names = {slot.value: slot for slot in plan.states}
    for slot in plan.states:
        place = layout.places.get(slot.name)
        if place is None or not place.holds(slot.type):
            return None
    bases: dict[int, int] = {}
    for group in weights_groups(plan):
        base = _base_in(group, names, layout.places)
        if base is None or base + group.nbytes > layout.nbytes:
            return None
        bases[group.id] = base
    return Layout(places=layout.places, group_bases=bases, nbytes=layout.nbytes)


def weights_groups(plan: plan_pb2.MemoryXPlan) -> Iterable[plan_pb2.Group]:
    """The weights groups with at least one state, in the order in which they are sent: what the layout is made for."""
    states = {slot.value for slot in plan.states}
    groups = {group.id: group for group in plan.groups if group.kind == plan_pb2.GROUP_KIND_WEIGHTS}
    for instruction in plan.instructions:
        if instruction.WhichOneof("kind") == "send":
            group = groups.pop(instruction.send.group, None)
            if group is not None and any(member.value in states for member in group.members):
                yield group


def states_in_order(plan: plan_pb2.MemoryXPlan) -> list[str]:
    """The plan's states in the order in which a step writes them first; behind them those that it does not write."""
    names = {slot.value: slot.name for slot in plan.states}
    written: dict[str, None] = {}
    for instruction in plan.instructions:
        states = [instruction.commit.state, *instruction.run.commits]
        written |= dict.fromkeys(names[state] for state in states if state)
    return list(written | dict.fromkeys(names.values()))


def _base_in(
    group: plan_pb2.Group, names: Mapping[int, plan_pb2.StateSlot], places: Mapping[str, StateExtent]
) -> int | None:
    """Where the group's buffer begins, if all of its members are states that lie as the group has them."""
    bases = set()
    for member in group.members:
        slot = names.get(member.value)
        place = places.get(slot.name) if slot is not None else None
        if place is None:
            return None
        bases.add(place.offset - member.offset)
    base = bases.pop() if len(bases) == 1 else None
    return base if base is not None and base >= 0 else None


def _type_of(place: StateExtent) -> plan_pb2.TensorType:
    return plan_pb2.TensorType(element_type=place.element_type, shape=place.shape)
