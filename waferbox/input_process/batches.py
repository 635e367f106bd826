"""The choice of a worker's batches among those of its loader, their checks, and the slots that they are written to."""

import hashlib
import mmap
import numbers
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .batch_digest import UNKNOWN, batch_digest
from .failures import InputFailure
from .hidden_tensors import hides_tensors
from .loader import Position
from .messages import DIGEST_BYTES, MOST_DIGESTS, BatchLayout, Prepare, TensorLayout

# --- Constants --------------------------------------------------------------------------------------------------------


class Constants:
    """The Python numbers, NumPy arrays and other objects in the batches of a loader. Used by one thread.

    Numbers may not change, as the traced step has those of the first batch as constants, and no object may hide
    tensors.
    """

    def __init__(self, source: str) -> None:
        """source: the name of the input_fn, and its place in the code."""
        self._source = source
        self._first: list[Any] | None = None
        self._objects: list[Any] = []  # of the last batch

    def check(self, number: int, batch: Any, leaves: list[Any]) -> None:
        """Raises InputFailure if a batch, with these leaves, has other numbers than the first, or hides tensors."""
        self._check_objects(number, leaves)
        known = [_comparable(leaf) for leaf in leaves if _is_number(leaf)]
        if self._first is None:
            self._first = known
        if known == self._first:
            return
        from torch.utils import _pytree as pytree

        paths = [
            (pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(batch)[0] if _is_number(leaf)
        ]
        changed = [index for index, value in enumerate(known) if value not in self._first[index : index + 1]]
        path, leaf = paths[changed[0]] if changed else ("some list", None)
        value = f", {leaf!r}," if isinstance(leaf, numbers.Number) else ""
        raise InputFailure(
            f"batch {number} of the input_fn {self._source} has at {path} a number or NumPy array that is no tensor"
            f"{value} and another one than before: the step is traced once, with those of the first batch. Return a "
            "tensor with one row for each sample in the collate_fn (`torch.full((len(rows),), value)`, "
            "`torch.as_tensor(array)`), or leave it out of the batch"
        )

    def _check_objects(self, number: int, leaves: list[Any]) -> None:
        known = {id(leaf) for leaf in self._objects}  # such as a dataset, which would take long to search
        self._objects = [leaf for leaf in leaves if _is_object(leaf)]
        for leaf in self._objects:
            if id(leaf) not in known and hides_tensors(leaf):
                raise InputFailure(
                    f"batch {number} of the input_fn {self._source} has an object of {type(leaf).__name__}, whose "
                    "tensors the step would not have: it has those of the first batch. Turn it into a dict or "
                    "namedtuple of its tensors"
                )


def _is_object(leaf: Any) -> bool:
    return not isinstance(leaf, str | bytes | numbers.Number | sys.modules["torch"].Tensor) and leaf is not None


def _is_number(leaf: Any) -> bool:
    """Whether a leaf is a number or an array of numbers. A step cannot compute with strings and other objects."""
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(leaf, numpy.ndarray)
    return leaf.dtype.kind in "biufc" if is_array else isinstance(leaf, numbers.Number)


def _comparable(leaf: Any) -> Any:
    """Returns an object that is equal for equal values; NaN is equal to NaN."""
    if isinstance(leaf, numbers.Number):
        return repr(leaf)
    return leaf.dtype.str, leaf.shape, leaf.tobytes()


# --- The worker's batches ---------------------------------------------------------------------------------------------


class Selection:
    """The choice of the worker's batches among those of the loader, and of its wafer's rows. Used by one thread.

    A batch with the rows of the whole step is cut; worker j of k takes every k-th, from the j-th. An input_fn may also
    shard, and yield batches with the rows of one wafer: all of them are this worker's.

    The first batch decides between the two, and all others have as many rows. With several wafers, a batch with the
    rows of one is a part only if the input_fn has read how the batch is divided; otherwise it is a batch of the whole
    step that is too small. On a single wafer both have the same rows, and the input_fn shards if it has read its rank.
    """

    def __init__(self, prepare: Prepare, layout: BatchLayout, source: str, *, begins: bool = True) -> None:
        """
        Args:
            prepare: the request for the input_fn.
            layout: the batches of the step.
            source: the name of the input_fn, and its place in the code.
            begins: whether the loader's first batch is the first of the execution.
        """
        self._source = source
        self._begins = begins
        self._constants = Constants(source)
        self._wafer = prepare.settings.wafer
        self._worker = prepare.settings.worker
        self._num_workers = prepare.settings.num_workers
        self._redivided = prepare.redivided
        self._is_vendors = prepare.vendor_builder
        self._global_rows = layout.global_rows
        self._local_rows = layout.local_rows
        self._micro_rows = layout.local_rows // layout.micro_batches
        self._names = prepare.input_names
        self._members = layout.members[:: layout.micro_batches]  # the first micro-batch of each tensor
        self._structure = _Structure()
        self._is_sharded = False  # set by the first batch
        self.digests: list[str] = []  # the first batch's, if it is a wafer's part
        self.first_batch = UNKNOWN  # its digest, of the first worker, until it is sent
        # Tensors that differ in their first dimension, as those of graphs, are one row, which is not divided.
        self._is_one_row = len({member.shape[0] for member in self._members}) > 1

    def own(self, batches: Iterator[Any], position: "Position", num_skipped: int = 0) -> Iterator[list[Any]]:
        """Yields the tensors of this worker's batches, cut to its wafer's rows and micro-batches, in the plan's order.

        If batches are dealt out, the loader's position after a step is after that step's batch, of whichever worker. If
        the input_fn shards, it is after the last batch of this worker.

        Args:
            batches: the batches of the loader.
            position: counts the batches, and sends the states that are due.
            num_skipped: the number of the worker's first batches that are counted but not yielded.
        """
        from torch.utils import _pytree as pytree

        before_all = position.states(last_step=self._worker)
        num_own = 0
        for number, batch in enumerate(batches):
            leaves, structure = pytree.tree_flatten(batch)
            self._constants.check(number, batch, leaves)
            tensors = self._named(number, batch) if self._names else self._tensors(number, batch, leaves, structure)
            if len(tensors) != len(self._members):
                raise InputFailure(
                    f"batch {number} of the input_fn {self._source} has {len(tensors)} tensors, but the step was "
                    f"compiled for {len(self._members)}: every batch must have the structure of the first"
                )
            rows = self._rows(number, tensors)
            if number == 0:
                self._is_sharded = self._shards(rows)
                if self._begins and self._wafer == self._worker == 0:
                    self.first_batch = batch_digest(leaves)
            self._check_rows(number, rows)
            is_sharded = self._is_sharded
            if number == 0 and is_sharded and rows < self._global_rows:
                self.digests = _digests(tensors)
            if is_sharded and self._redivided:
                raise InputFailure(
                    f"the job has lost wafers, and the batches of the input_fn {self._source} cannot be divided among "
                    "the others, since it makes the part of each wafer itself: let it return whole batches, or do not "
                    "set min_num_csx"
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
                        for index, (tensor, member) in enumerate(zip(tensors, self._members))  # noqa: B905 - as many
                        for part in self._parts(number, index, tensor, member, first_row)
                    ]
            position.send(position.states(last_step))

    def _named(self, number: int, batch: Any) -> list[Any]:
        """Returns the tensors that the step takes, in its order, with the element types that it was compiled for."""
        torch = sys.modules["torch"]
        found = _tensors_by_name(batch)
        missing = [name for name in self._names if name not in found]
        if missing:
            raise InputFailure(
                f"batch {number} of the input_fn {self._source} has no tensor {missing[0]!r}, but {sorted(found)}: "
                "every batch must have the structure of the first"
            )
        dtypes = [getattr(torch, member.dtype) for member in self._members]
        return [
            tensor.to(dtype) if tensor.is_floating_point() == dtype.is_floating_point else tensor
            for tensor, dtype in zip((found[name] for name in self._names), dtypes)  # noqa: B905 - as many
        ]

    def _tensors(self, number: int, batch: Any, leaves: list[Any], structure: Any) -> list[Any]:
        """Returns all tensors in the order of the first batch, since a dict may have another one."""
        tensors, missing, unknown = self._structure.tensors(batch, leaves, structure)
        if missing or unknown:
            raise InputFailure(
                f"batch {number} of the input_fn {self._source} has not the structure of the first: it has "
                f"{_listed(unknown)} in the place of {_listed(missing)}; let every batch have the same keys, with a "
                "tensor at each"
            )
        return tensors

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
        assert count is not None
        return count

    def _shards(self, rows: int) -> bool:
        """Whether the input_fn, whose first batch has so many rows, yields the part of one wafer."""
        if rows != self._local_rows:
            return False
        if rows == self._global_rows:
            return _rank_was_asked()
        # The vendor's package does not record whether the input_fn has read how the batch is divided.
        return self._is_vendors or _share_was_asked()

    def _check_rows(self, number: int, rows: int) -> None:
        """Raises InputFailure unless a batch has the rows that the step was compiled for, or a wafer's part of them."""
        expected = self._local_rows if self._is_sharded else self._global_rows
        if rows == expected:
            return
        compiled = f"the step was compiled for {self._global_rows}, those of the first"
        if self._is_sharded and expected < self._global_rows:
            compiled += f", of which each wafer has {expected}"
        way_out = (
            "every batch must have the size of the first. Where it is the last of a pass, leave it out, "
            "drop_last=True in the torch DataLoader, or fill it up, with a mask that keeps the added rows out of the "
            "loss"
        )
        if number == 0 and rows == self._local_rows:
            way_out += (
                "; an input_fn that makes the part of its own wafer must call "
                "cstorch.distributed.get_streaming_batch_size(batch_size)"
            )
        raise InputFailure(f"batch {number} of the input_fn {self._source} has {rows} rows, but {compiled}: {way_out}")

    def _parts(self, number: int, index: int, tensor: Any, member: TensorLayout, first_row: int) -> Sequence[Any]:
        """Returns the rows of this worker's wafer, in micro-batches."""
        if self._is_one_row:
            self._check(number, index, tensor, member, "", 0)
            return [tensor.detach()]
        part = tensor.detach()[first_row : first_row + self._local_rows]
        self._check(number, index, part, member, " per sample", 1)
        micro_batches: Sequence[Any] = part.split(self._micro_rows)
        return micro_batches

    def _check(self, number: int, index: int, tensor: Any, member: TensorLayout, per: str, first: int) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != member.dtype or tuple(tensor.shape)[first:] != member.shape[first:]:
            raise InputFailure(
                f"tensor {index} of batch {number} of the input_fn {self._source} is {dtype} with "
                f"{list(tensor.shape)[first:]}{per}, but the step was compiled for {member.dtype} with "
                f"{list(member.shape)[first:]}: every batch must be like the first"
                + ("; fill up the tensors of each batch to the same sizes" if self._is_one_row else "")
            )


def _digests(tensors: Sequence[Any]) -> list[str]:
    """Returns digests of the integer tensors in which all rows differ: ids or tokens of samples, no masks."""
    torch = sys.modules["torch"]
    found = []
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or len(tensor) < 2:
            continue
        rows = tensor.detach().cpu().contiguous().flatten(1) if tensor.dim() > 1 else tensor.detach().cpu().unsqueeze(1)
        if len({bytes(row) for row in rows.numpy()}) == len(rows):
            found.append(hashlib.blake2b(rows.numpy().tobytes(), digest_size=DIGEST_BYTES).hexdigest())
    return found[:MOST_DIGESTS]


class _Structure:
    """The structure of the first batch, by which the tensors of later ones are found. Used by one thread."""

    def __init__(self) -> None:
        self._first: Any = None  # the structure of the first batch, from torch's pytree
        self._paths: list[str] = []

    def tensors(self, batch: Any, leaves: list[Any], structure: Any) -> tuple[list[Any], list[str], list[str]]:
        """Returns the tensors in the order of the first batch, and the paths of missing and of unknown tensors.

        leaves, structure: the batch, flattened by torch's pytree.
        """
        kinds = [isinstance(leaf, sys.modules["torch"].Tensor) for leaf in leaves]
        tensors = [leaf for leaf, is_tensor in zip(leaves, kinds) if is_tensor]  # noqa: B905 - as many
        if (structure, kinds) == self._first:
            return tensors, [], []
        # Paths cost more than the comparison, so they are made only for the first batch and for different ones.
        paths = _tensor_paths(batch)
        if self._first is None:
            self._first, self._paths = (structure, kinds), paths
            return tensors, [], []
        missing = sorted(set(self._paths) - set(paths))
        unknown = sorted(set(paths) - set(self._paths))
        if missing or unknown:
            return [], missing, unknown
        found = dict(zip(paths, tensors))  # noqa: B905 - as many
        return [found[path] for path in self._paths], [], []


def _tensor_paths(batch: Any) -> list[str]:
    """Returns the path of each tensor as Python code after the batch's name: "['labels']", "[0]"."""
    from torch.utils import _pytree as pytree

    return [
        pytree.keystr(path)
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]
        if isinstance(leaf, sys.modules["torch"].Tensor)
    ]


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths) if paths else "nothing"


def _tensors_by_name(batch: Any) -> dict[str, Any]:
    """Returns the tensors by name: "input" and the path, joined by underscores."""
    from torch.utils import _pytree as pytree

    torch = sys.modules["torch"]
    return {
        "_".join(["input", *map(_step, path)]): leaf
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]
        if isinstance(leaf, torch.Tensor)
    }


def _step(key: Any) -> str:
    """Returns the text of one step of a path: an index, a key, or the name of an attribute."""
    return str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", ""))))


def _rank_was_asked() -> bool:
    distributed = sys.modules.get("cstorch.distributed.streaming")
    return distributed is not None and distributed.rank_was_asked()


def _share_was_asked() -> bool:
    distributed = sys.modules.get("cstorch.distributed.streaming")
    return distributed is not None and distributed.share_was_asked()


def endless(loader: Any, max_empty_passes: int) -> Iterator[Any]:
    """Yields the batches of one pass after the other.

    Raises:
        InputFailure: more than `max_empty_passes` in a row have no batch, or the loader can be iterated only once.
    """
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
    """The shared memory that batches are written to: slots of equal size, one for a batch. Used by one thread."""

    def __init__(self, file_descriptor: int, layout: BatchLayout) -> None:
        torch = sys.modules["torch"]
        memory = mmap.mmap(file_descriptor, layout.slot_bytes * layout.num_slots)
        os.close(file_descriptor)
        self._slots = [
            [_view(torch, memory, slot * layout.slot_bytes + member.offset, member) for member in layout.members]
            for slot in range(layout.num_slots)
        ]

    def write(self, slot: int, tensors: Sequence[Any]) -> None:
        """Copies a batch into a slot."""
        for view, tensor in zip(self._slots[slot], tensors):  # noqa: B905 - as many as the members
            view.copy_(tensor)


def _view(torch: Any, memory: mmap.mmap, offset: int, member: TensorLayout) -> Any:
    count = 1
    for size in member.shape:
        count *= size
    if count == 0:
        return torch.empty(member.shape, dtype=getattr(torch, member.dtype))
    flat = torch.frombuffer(memory, dtype=getattr(torch, member.dtype), count=count, offset=offset)
    return flat.view(member.shape)
