"""Makes groups: packs tensors into messages, small ones together, and numbers values, groups and kernels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from xdsl.ir import SSAValue

from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.types import AnyTensorType
from waferbox.cirh.modules.sources import OperationSource
from waferbox.links.elements import aligned
from wsc.v1 import plan_pb2

# A group takes further tensors up to this size: large enough that the fixed cost of a message does not matter, small
# enough that the first tensors do not wait long for the last.
COALESCE_BYTES: Final = 1 << 20

REDUCTIONS: Final = {
    "sum": plan_pb2.REDUCTION_SUM,
    "max": plan_pb2.REDUCTION_MAX,
    "min": plan_pb2.REDUCTION_MIN,
}


class Numbers:
    """The numbers of values and groups in a plan, which all roles share."""

    def __init__(self) -> None:
        self._values: dict[tuple[SSAValue, int], int] = {}
        self._groups = 0

    def value(self, value: SSAValue, micro_batch: int = 0) -> int:
        """The number of a value, or of one micro-batch's part of it; numbers begin with 1."""
        return self._values.setdefault((value, micro_batch), len(self._values) + 1)

    def parts(self, value: SSAValue, micro_batches: int) -> list[int]:
        """The numbers of all parts of a value, one after the other if none of them has a number yet."""
        return [self.value(value, micro_batch) for micro_batch in range(micro_batches)]

    def values(self, values: Iterable[SSAValue]) -> list[int]:
        return [self.value(value) for value in values]

    def group(self) -> int:
        """A number for a new group; numbers begin with 1."""
        self._groups += 1
        return self._groups


@dataclass(slots=True, eq=False)
class Bundle:
    """A group that is being made, with its values in order."""

    group: plan_pb2.Group
    values: list[SSAValue] = field(default_factory=list)

    @property
    def id(self) -> int:
        return self.group.id

    @property
    def nbytes(self) -> int:
        return self.group.nbytes

    def add(self, numbers: Numbers, value: SSAValue, type: AnyTensorType, micro_batch: int = 0) -> None:
        """Appends a value."""
        self.values.append(value)
        self._pack(numbers.value(value, micro_batch), type, aligned(self.group.nbytes))

    def add_parts(self, numbers: Numbers, value: SSAValue, type: AnyTensorType, micro_batches: int) -> None:
        """Appends each micro-batch's part of a value; type: of a part."""
        self.values.append(value)
        gathered = self.group.reduction == plan_pb2.REDUCTION_GATHER
        for number in numbers.parts(value, micro_batches):
            end = self.group.nbytes
            self._pack(number, type, end if gathered else aligned(end))

    def _pack(self, number: int, type: AnyTensorType, offset: int) -> None:
        self.group.members.add(value=number, type=types.to_proto(type), offset=offset)
        self.group.nbytes = offset + types.nbytes(type)


def has_room(bundle: Bundle, type: AnyTensorType, most_bytes: int = COALESCE_BYTES) -> bool:
    """Whether a value of this type may join the group."""
    return bundle.nbytes + types.nbytes(type) <= most_bytes


class KernelTable:
    """The kernels of one role, by text: equal layers share a kernel."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._sources: dict[tuple[int, str], Sequence[OperationSource]] = {}  # by number and layer

    def number(self, text: str, layer: str = "", sources: Sequence[OperationSource] = ()) -> int:
        """The number of the kernel with this text.

        Args:
            text: the text.
            layer: the layer whose runs need it; empty: runs are not told apart, and have the sources of all.
            sources: of the operations that can fail.
        """
        number = self._numbers.setdefault(text, len(self._numbers) + 1)
        if sources and (known := self._sources.setdefault((number, ""), sources)) != sources:
            others = (source for source in sources if source not in known)
            self._sources[number, layer] = sources if layer else (*known, *others)
        return number

    def sources(self) -> Sequence[plan_pb2.KernelSources]:
        return [
            plan_pb2.KernelSources(
                kernel=number,
                layer=layer,
                operations=[
                    plan_pb2.KernelSources.Operation(name=each.operation, source=each.source) for each in sources
                ],
            )
            for (number, layer), sources in self._sources.items()
        ]

    def messages(self) -> Sequence[plan_pb2.Kernel]:
        return [plan_pb2.Kernel(id=number, cirh=text) for text, number in self._numbers.items()]
