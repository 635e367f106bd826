"""The states that a part of a step changes, with their values before it, which a condition may bring back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.tensor import Handle, LazyTensor, new_tensor


class StateChanges:
    """The changes of states from the construction to `choose`: of all tensors that are carried to the next step.

    A state may be written in place, by itself or by a view, or replaced, as by `module.mask = other` or
    `parameter.data = other`. Tensors of the step itself, such as gradients, are no states.

    Args:
        states: The getter of each announced state, by name.
        record: Records a call of the step.
        told: What the recorder tells of writes: this object, from the construction to `choose`.
    """

    def __init__(
        self,
        states: Mapping[str, Callable[[], torch.Tensor]],
        record: Callable[..., Any],
        told: "list[StateChanges]",
    ) -> None:
        self._states = states
        self._record = record
        self._told = told
        self._written: dict[int, tuple[LazyTensor, torch.Tensor]] = {}  # by id of a cell, with the value before
        tensors = {name: getter() for name, getter in states.items()}
        self._handles: dict[str, Handle] = {
            name: tensor._handle for name, tensor in tensors.items() if isinstance(tensor, LazyTensor)
        }
        # States that the step has replaced already have no cell, so that writes to them are not noted.
        self._replaced = {
            name: tensors[name].detach().clone() for name, handle in self._handles.items() if handle.cell is None
        }
        told.append(self)

    def note_write(self, cell: Cell) -> None:
        """Keeps the value of a state, which is about to be written."""
        if id(cell) not in self._written:
            state = new_tensor(cell)
            # Directly, since dispatch does not call itself while it records the write.
            self._written[id(cell)] = state, self._record(torch.ops.aten.clone.default, (state,), {})

    @torch.no_grad()
    def choose(self, keeps: torch.Tensor) -> None:
        """Keeps the changes if `keeps`, a boolean of rank 0, is true; takes them back otherwise. Later ones stay."""
        self._told.remove(self)
        # All are computed before any is written, since states may have been exchanged.
        replaced = [
            (tensor, torch.where(keeps, tensor.detach(), before)) for tensor, before in self._replacements().values()
        ]
        for state, before in self._written.values():
            state.copy_(torch.where(keeps, state, before))
        for tensor, chosen in replaced:
            tensor.data = chosen

    def _replacements(self) -> Mapping[int, tuple[LazyTensor, torch.Tensor]]:
        """The tensors that took the place of states, or were written in the place of one, with the value before."""
        found: dict[int, tuple[LazyTensor, torch.Tensor]] = {}
        for name, handle in self._handles.items():
            tensor = self._states[name]()
            before = self._before(name, handle)
            is_same = tensor.shape == before.shape and tensor.dtype == before.dtype  # others are refused at the end
            if isinstance(tensor, LazyTensor) and is_same and (tensor._handle is not handle or name in self._replaced):
                found[id(tensor)] = tensor, before
        return found

    def _before(self, name: str, handle: Handle) -> torch.Tensor:
        if name in self._replaced:
            return self._replaced[name]
        written = self._written.get(id(handle.cell))
        if written is None:
            return LazyTensor(handle)
        meta = handle.meta
        return written[1].as_strided(meta.shape, meta.stride(), int(meta.storage_offset()))
