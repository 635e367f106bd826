"""The reduction of the children's frames, always in child order, so that equal runs give equal bits. Imports torch."""

from collections.abc import Sequence

import torch

from waferbox.links.elements import torch_dtype
from waferbox.links.link import Message
from waferbox.links.shared_memory import Slice
from waferbox.runtime.groups import ReceivedGroup
from wsc.v1 import plan_pb2

# Elements added at a time: the sum of one block stays in the cache until the last child is added.
BLOCK_ELEMENTS = 256 * 1024
HALVES = (torch.bfloat16, torch.float16)


class Join:
    """The reduction of one group. Halves are added in float32, and rounded once. Used by one thread."""

    def __init__(self, group: plan_pb2.Group, child_bytes: Sequence[int], result: Slice) -> None:
        """child_bytes: the sizes of the frames, in child order. Raises ValueError: the group cannot be reduced."""
        element_types = {member.type.element_type for member in group.members}
        if len(element_types) != 1:
            raise ValueError(f"group {group.id} is reduced, and has {len(element_types)} element types")
        if group.reduction == plan_pb2.REDUCTION_UNSPECIFIED:
            raise ValueError(f"group {group.id} does not say how it is reduced")
        element_type = element_types.pop()
        dtype = torch_dtype(element_type)
        self._kind = group.reduction
        self._frames = [
            ReceivedGroup(_flat(group.id, element_type, nbytes // dtype.itemsize, nbytes)) for nbytes in child_bytes
        ]
        self._out = result.memory.tensor(dtype, (result.nbytes // dtype.itemsize,), result.offset)
        self._scratch = torch.empty(min(BLOCK_ELEMENTS, self._out.numel())) if dtype in HALVES else None

    def __call__(self, messages: Sequence[Message]) -> None:
        """Writes the reduction of the children's frames, in child order, to the result."""
        parts = [frames.tensors(message)[0] for frames, message in zip(self._frames, messages, strict=True)]
        if self._kind == plan_pb2.REDUCTION_GATHER:
            torch.cat(parts, out=self._out)
            return
        for begin in range(0, self._out.numel(), BLOCK_ELEMENTS):
            block = slice(begin, begin + BLOCK_ELEMENTS)
            blocks = [part[block] for part in parts]
            if self._kind == plan_pb2.REDUCTION_SUM:
                self._add(blocks, self._out[block])
            else:
                self._select(blocks, self._out[block])

    def _add(self, blocks: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if self._scratch is None:
            torch.add(blocks[0], blocks[1], out=out)
            for block in blocks[2:]:
                out.add_(block)
            return
        total = self._scratch[: out.numel()].copy_(blocks[0])
        for block in blocks[1:]:
            total.add_(block)
        out.copy_(total)

    def _select(self, blocks: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        select = torch.maximum if self._kind == plan_pb2.REDUCTION_MAX else torch.minimum
        select(blocks[0], blocks[1], out=out)
        for block in blocks[2:]:
            select(out, block, out=out)


def _flat(group: int, element_type: "plan_pb2.ElementType.ValueType", count: int, nbytes: int) -> plan_pb2.Group:
    """Returns a group whose only member is the whole buffer."""
    whole = plan_pb2.GroupMember(type=plan_pb2.TensorType(element_type=element_type, shape=[count]))
    return plan_pb2.Group(id=group, members=[whole], nbytes=nbytes)
