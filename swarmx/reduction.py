"""The reduction of the children's frames, always in child order, so that equal runs give equal bits. Imports torch."""

from collections.abc import Sequence

import torch

from waferbox.links.elements import torch_dtype
from waferbox.links.link import Message
from waferbox.links.shared_memory import Slice
from waferbox.runtime.schedule import part_bytes
from wsc.v1 import plan_pb2

# Elements added at a time: the sum of one block stays in the cache until the last child is added.
BLOCK_ELEMENTS = 256 * 1024
HALVES = (torch.bfloat16, torch.float16)


class Join:
    """The reduction of one group. Halves are added in float32, and rounded once. Used by one thread."""

    def __init__(self, group: plan_pb2.Group, result: Slice, first_wafer: int = 0) -> None:
        """first_wafer: that of the first part of a GATHER. Raises ValueError: the group cannot be reduced."""
        element_types = {member.type.element_type for member in group.members}
        if len(element_types) != 1:
            raise ValueError(f"group {group.id} is reduced, and has {len(element_types)} element types")
        if group.reduction == plan_pb2.REDUCTION_UNSPECIFIED:
            raise ValueError(f"group {group.id} does not say how it is reduced")
        self._dtype = torch_dtype(element_types.pop())
        self._kind = group.reduction
        self._before = first_wafer * part_bytes(group) // self._dtype.itemsize
        self._out = result.memory.tensor(self._dtype, (result.nbytes // self._dtype.itemsize,), result.offset)
        self._scratch = torch.empty(min(BLOCK_ELEMENTS, self._out.numel())) if self._dtype in HALVES else None

    @property
    def takes_chunks(self) -> bool:
        """Whether a part of the result needs that part of the frames alone."""
        return self._kind != plan_pb2.REDUCTION_GATHER

    def put_together(self, frames: Sequence[Message]) -> None:
        """Writes the parts of all wafers to the result of a GATHER, in the order of the wafers' numbers."""
        parts = [frame.tensor(self._dtype, (frame.nbytes // self._dtype.itemsize,), 0) for frame in frames]
        if not self._before:
            torch.cat(parts, out=self._out)
        else:
            self._out.copy_(torch.cat(parts).roll(self._before))

    def add(self, messages: Sequence[Message], begin: int, end: int) -> None:
        """Writes the reduction of the children's bytes from begin to end, in child order, to the result."""
        size = self._dtype.itemsize
        count, first = (end - begin) // size, begin // size
        parts = [message.tensor(self._dtype, (count,), begin - message.begin) for message in messages]
        for at in range(0, count, BLOCK_ELEMENTS):
            blocks = [part[at : at + BLOCK_ELEMENTS] for part in parts]
            out = self._out[first + at : first + at + len(blocks[0])]
            if self._kind == plan_pb2.REDUCTION_SUM:
                self._add(blocks, out)
            else:
                self._select(blocks, out)

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
