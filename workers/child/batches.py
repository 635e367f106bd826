"""Which batches of the loader are this worker's, and the slots of shared memory that they are written to."""

import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .failures import InputFailure
from .loader_state import Position


class Selection:
    """Which batches of the loader are this worker's, and which of their rows its wafer's.

    A batch with the rows of the whole step is cut; worker j of k takes every k-th, from the j-th. A batch that has the
    rows of one wafer already, of several, comes from an input_fn that shards by itself: all such batches are this
    worker's. On a single wafer the two look alike: there the input_fn shards if it has asked for its streaming rank.
    """

    def __init__(self, prepare: dict[str, Any], load: dict[str, Any], source: str) -> None:
        """source: what the input_fn is called, and where it is written."""
        self._source = source
        self._wafer: int = prepare["wafer"]
        self._worker: int = prepare["worker"]
        self._num_workers: int = prepare["num_workers"]
        self._redivided: bool = prepare["redivided"]
        self._global_rows: int = load["global_rows"]
        self._local_rows: int = load["local_rows"]
        self._micro_rows: int = load["local_rows"] // load["micro_batches"]
        self._names: list[str] = prepare["input_names"]
        self._members: list[dict[str, Any]] = load["members"][:: load["micro_batches"]]  # of each tensor the first
        # Tensors that differ in their first dimension, as those of graphs do, are one row, which is not divided.
        self._is_one_row = len({member["shape"][0] for member in self._members}) > 1

    def own(self, batches: Iterator[Any], position: "Position", num_skipped: int = 0) -> Iterator[list[Any]]:
        """The tensors of this worker's batches, cut to its wafer's rows and micro-batches, in the order of the plan.

        num_skipped: the first ones, which count as the others do, and are left out.

        Where batches are dealt out, the loader's position after a step is behind that step's batch, whoever took it;
        where the input_fn shards, it is behind the last batch of this worker's own.
        """
        before_all = position.states(last_step=self._worker)
        num_own = 0
        for number, batch in enumerate(batches):
            tensors = self._named(number, batch) if self._names else _tensors(batch)
            if len(tensors) != len(self._members):
                raise InputFailure(
                    f"batch {number} of the input_fn {self._source} has {len(tensors)} tensors, but the step was "
                    f"compiled for {len(self._members)}: every batch must have the structure of the first"
                )
            rows = self._rows(number, tensors)
            is_sharded = rows == self._local_rows and (rows < self._global_rows or _rank_was_asked())
            if is_sharded and self._redivided:
                raise InputFailure(
                    f"the job has lost wafers, and the batches of the input_fn {self._source} cannot be divided among "
                    "those that are left, for it makes the part of each wafer itself; let it return whole batches, or "
                    "do not set min_num_csx"
                )
            if number == 0 and is_sharded:
                position.send(before_all)
            last_step = num_own * self._num_workers + self._worker + self._num_workers if is_sharded else number + 1
            if is_sharded or number % self._num_workers == self._worker:
                num_own += 1
                position.streamed(self._local_rows)
                if num_own > num_skipped:
                    first_row = 0 if is_sharded else self._wafer * self._local_rows
                    yield [
                        part
                        for index, (tensor, member) in enumerate(zip(tensors, self._members))  # noqa: B905 - as above
                        for part in self._parts(number, index, tensor, member, first_row)
                    ]
            position.send(position.states(last_step))

    def _named(self, number: int, batch: Any) -> list[Any]:
        """The tensors that the step takes, in its order, with the element types that it was compiled for."""
        torch = sys.modules["torch"]
        found = _tensors_by_name(batch)
        missing = [name for name in self._names if name not in found]
        if missing:
            raise InputFailure(
                f"batch {number} of the input_fn {self._source} has no tensor {missing[0]!r}, but {sorted(found)}: "
                "every batch must have the structure of the first"
            )
        dtypes = [getattr(torch, member["dtype"]) for member in self._members]
        return [
            tensor.to(dtype) if tensor.is_floating_point() == dtype.is_floating_point else tensor
            for tensor, dtype in zip((found[name] for name in self._names), dtypes)  # noqa: B905 - as above
        ]

    def _rows(self, number: int, tensors: Sequence[Any]) -> int:
        if self._is_one_row:
            return self._global_rows
        rows = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
        if len(rows) != 1 or None in rows:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise InputFailure(
                f"the tensors of batch {number} of the input_fn {self._source} differ in their first dimension, the "
                f"batch: {shapes}"
            )
        (count,) = rows
        if count not in (self._global_rows, self._local_rows):
            raise InputFailure(
                f"batch {number} of the input_fn {self._source} has {count} rows, but the step was compiled for "
                f"{self._global_rows}: every batch must have the size of the first; drop_last=True in the torch "
                "DataLoader leaves out a smaller last one"
            )
        return int(count)

    def _parts(self, number: int, index: int, tensor: Any, member: dict[str, Any], first_row: int) -> Sequence[Any]:
        """A tensor of this worker's wafer, in micro-batches."""
        if self._is_one_row:
            self._check(number, index, tensor, member, "", 0)
            return [tensor.detach()]
        part = tensor.detach()[first_row : first_row + self._local_rows]
        self._check(number, index, part, member, " per sample", 1)
        micro_batches: Sequence[Any] = part.split(self._micro_rows)
        return micro_batches

    def _check(self, number: int, index: int, tensor: Any, member: dict[str, Any], per: str, first: int) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != member["dtype"] or list(tensor.shape)[first:] != member["shape"][first:]:
            raise InputFailure(
                f"tensor {index} of batch {number} of the input_fn {self._source} is {dtype} with "
                f"{list(tensor.shape)[first:]}{per}, but the step was compiled for {member['dtype']} with "
                f"{member['shape'][first:]}: every batch must be like the first"
                + ("; fill up the tensors of each batch to the same sizes" if self._is_one_row else "")
            )


def _tensors(batch: Any) -> list[Any]:
    from torch.utils import _pytree as pytree

    torch = sys.modules["torch"]
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _tensors_by_name(batch: Any) -> dict[str, Any]:
    """By "input" and the path to each, joined by underscores."""
    from torch.utils import _pytree as pytree

    torch = sys.modules["torch"]
    return {
        "_".join(["input", *map(_step, path)]): leaf
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]
        if isinstance(leaf, torch.Tensor)
    }


def _step(key: Any) -> str:
    """One step of a path: a position, a key, or the name of an attribute."""
    return str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", ""))))


def _rank_was_asked() -> bool:
    distributed = sys.modules.get("cstorch.distributed.streaming")
    return distributed is not None and distributed.rank_was_asked()


def endless(loader: Any, max_empty_passes: int) -> Iterator[Any]:
    """Batches of one pass after the other. InputFailure when too many give nothing, or there can be no second."""
    count = num_empty = 0
    while True:
        before = count
        iterator = iter(loader)
        for batch in iterator:
            count += 1
            yield batch
        num_empty = num_empty + 1 if count == before else 0
        if num_empty > max_empty_passes or iterator is loader:
            raise InputFailure(
                f"the loader ran dry after {count} batches and more are needed: it yields nothing, or it is a "
                "generator, which cannot be iterated a second time; let the input_fn return an object with __iter__, "
                "or lower num_steps"
            )


class Ring:
    """The shared memory that batches are written to: slots of equal size, each with all tensors of a batch."""

    def __init__(self, file_descriptor: int, load: dict[str, Any]) -> None:
        torch = sys.modules["torch"]
        memory = mmap.mmap(file_descriptor, load["slot_bytes"] * load["num_slots"])
        os.close(file_descriptor)
        self._slots = [
            [_view(torch, memory, slot * load["slot_bytes"] + member["offset"], member) for member in load["members"]]
            for slot in range(load["num_slots"])
        ]

    def write(self, slot: int, tensors: Sequence[Any]) -> None:
        """Copy a batch into a slot."""
        for view, tensor in zip(self._slots[slot], tensors):  # noqa: B905 - as many as the members
            view.copy_(tensor)


def _view(torch: Any, memory: mmap.mmap, offset: int, member: dict[str, Any]) -> Any:
    count = 1
    for size in member["shape"]:
        count *= size
    if count == 0:
        return torch.empty(member["shape"], dtype=getattr(torch, member["dtype"]))
    flat = torch.frombuffer(memory, dtype=getattr(torch, member["dtype"]), count=count, offset=offset)
    return flat.view(member["shape"])
