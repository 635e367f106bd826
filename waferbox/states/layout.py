"""The layout of states, and of the weights groups of a plan, in the shared memory or the file that has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from waferbox.links.elements import aligned, tensor_bytes
from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StateExtent:
    """The type of a state and its position in a piece of memory, or in a file."""

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
        """Whether the other extent has a state of the same type."""
        return self.element_type == other.element_type and self.shape == other.shape

    def moved_to(self, offset: int) -> "StateExtent":
        """Returns the extent of the same state at another offset."""
        return replace(self, offset=offset)


# --- Layouts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRequirements:
    """The states that a plan keeps in one process, and the order in which a step uses them.

    Attributes:
        slots: the states: value, name, type.
        weights_groups: the groups that are sent in place, in the order in which they are sent. The members of such a
            group that are states lie together, in the order and at the offsets of the group.
        write_order: names of states. Those that a step writes first come first; states without a place in it follow.
    """

    slots: Sequence[plan_pb2.StateSlot]
    weights_groups: Sequence[plan_pb2.Group] = ()
    write_order: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The extents of states in one shared memory, which the wafers map."""

    extents: Mapping[str, StateExtent]
    group_bases: Mapping[int, int]  # weights group -> begin of its buffer
    nbytes: int


def lay_out(required: StateRequirements, kept: Mapping[str, StateExtent]) -> Layout:
    """Returns a new layout for the required states, with the other kept ones behind them.

    A state that belongs to several groups lies in the first. A later group is either found to lie there as a whole, or
    has no base, and its members are copied when it is sent.
    """
    names = {slot.value: slot for slot in required.slots}
    extents: dict[str, StateExtent] = {}
    bases: dict[int, int] = {}
    end = 0
    for group in required.weights_groups:
        base = _base_in(group, names, extents)
        if base is None:
            base = end
            for member in group.members:
                slot = names.get(member.value)
                if slot is not None and slot.name not in extents:
                    extents[slot.name] = StateExtent.at(base + member.offset, slot.type)
        end = max(end, aligned(base + group.nbytes))
        bases[group.id] = base
    rest: list[tuple[str, plan_pb2.TensorType]] = [(slot.name, slot.type) for slot in required.slots]
    named = {name for name, _ in rest}
    rest += [(name, _type_of(extent)) for name, extent in kept.items() if name not in named]
    for name, tensor_type in rest:
        if name not in extents:
            extents[name] = StateExtent.at(end, tensor_type)
            end = aligned(end + extents[name].nbytes)
    return Layout(extents=extents, group_bases=bases, nbytes=max(end, 1))


def fit(required: StateRequirements, layout: Layout) -> Layout | None:
    """Returns the layout with the required groups, if it has all required states as they have to lie; else None."""
    names = {slot.value: slot for slot in required.slots}
    for slot in required.slots:
        extent = layout.extents.get(slot.name)
        if extent is None or not extent.holds(slot.type):
            return None
    bases: dict[int, int] = {}
    for group in required.weights_groups:
        base = _base_in(group, names, layout.extents)
        if base is None or base + group.nbytes > layout.nbytes:
            return None
        bases[group.id] = base
    return Layout(extents=layout.extents, group_bases=bases, nbytes=layout.nbytes)


def _base_in(
    group: plan_pb2.Group, names: Mapping[int, plan_pb2.StateSlot], extents: Mapping[str, StateExtent]
) -> int | None:
    """Returns the begin of the group's buffer, if all its members are states at the offsets of the group; else None."""
    bases = set()
    for member in group.members:
        slot = names.get(member.value)
        extent = extents.get(slot.name) if slot is not None else None
        if extent is None:
            return None
        bases.add(extent.offset - member.offset)
    base = bases.pop() if len(bases) == 1 else None
    return base if base is not None and base >= 0 else None


def _type_of(extent: StateExtent) -> plan_pb2.TensorType:
    return plan_pb2.TensorType(element_type=extent.element_type, shape=extent.shape)
