"""Samplers whose order of samples is the same for any number of systems and workers."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from cstorch.distributed import streaming


class PadIndex:
    """The index of a sample that is missing in a batch. There is one, `pad_index`, in every process."""

    def __repr__(self) -> str:
        return "pad_index"

    def __reduce__(self) -> str:
        return "pad_index"  # also where a torch DataLoader sends indices to processes of its own


pad_index = PadIndex()


class ShuffleSampler(Sampler[int]):
    """The indices of a data set, pass after pass in another order.

    Args:
        data_source: A data set with a length.
        num_samples: The indices of a pass; None: as many as the data set has. With more, they begin anew.
        shuffle: Whether the order depends on seed and pass; False: the data set's own order.
        seed: The seed; None: drawn from torch's generator, whose state is the same in all workers when input_fn is
            called.
        start_index: The number of samples, of all passes, that are left out at the beginning.

    Raises:
        ValueError: A number is out of range.

    Reference: release 2.10, `cerebras.pytorch.utils.data.sampler`.
    """

    def __init__(
        self,
        data_source: Dataset[Any],
        num_samples: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        start_index: int = 0,
    ) -> None:
        self._length = len(data_source)  # type: ignore[arg-type]  # a TypeError says so
        self._num_samples = self._length if num_samples is None else num_samples
        if self._length < 1 or self._num_samples < 1:
            raise ValueError(f"there is nothing to sample: {self._length} samples, num_samples={self._num_samples}")
        self._shuffle = shuffle
        self._seed = int(torch.empty((), dtype=torch.int64).random_()) if seed is None else seed
        self.set_start(start_index)

    @property
    def num_samples(self) -> int:
        """The indices of a whole pass."""
        return self._num_samples

    def set_start(self, start_index: int, pass_samples: int | None = None) -> None:
        """Makes the next pass begin after a number of samples of all passes.

        Args:
            start_index: The number of samples.
            pass_samples: The samples used of each pass; None: all.

        Raises:
            ValueError: `start_index` is negative.
        """
        if start_index < 0:
            raise ValueError(f"start_index must not be negative, got {start_index}")
        self._pass, self._start = divmod(start_index, pass_samples or self._num_samples)

    @property
    def left(self) -> int:
        """The number of indices of the next pass."""
        return max(0, self._num_samples - self._start)

    def __len__(self) -> int:
        return self.left

    def __iter__(self) -> Iterator[int]:
        number, start = self._pass, self._start
        self._pass, self._start = number + 1, 0
        order = self._order(number)
        for position in range(start, self._num_samples):
            yield order[position % self._length] if order else position % self._length

    def _order(self, number: int) -> list[int] | None:
        if not self._shuffle:
            return None
        generator = torch.Generator().manual_seed((self._seed + number) % (1 << 63))
        order: list[int] = torch.randperm(self._length, generator=generator).tolist()
        return order


class BatchSampler(Sampler[list[Any]]):
    """Lists of batch_size indices.

    Args:
        sampler: A sampler of indices.
        batch_size: The number of indices of a batch, at least 1.
        drop_last: Whether a smaller last batch is left out.
        pad_last: Whether it is filled with `pad_index`; only without `drop_last`.

    Raises:
        ValueError: `batch_size` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.utils.data.sampler`.
    """

    def __init__(self, sampler: Sampler[int] | Iterable[int], batch_size: int, drop_last: bool, pad_last: bool) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._pad_last = pad_last

    def __len__(self) -> int:
        samples = len(self._sampler)  # type: ignore[arg-type]  # a TypeError says so
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def __iter__(self) -> Iterator[list[Any]]:
        batch: list[Any] = []
        for index in self._sampler:
            batch.append(index)
            if len(batch) == self._batch_size:
                yield batch
                batch = []
        if batch and not self._drop_last:
            yield batch + [pad_index] * (self._batch_size - len(batch) if self._pad_last else 0)


class ShardedSampler(Sampler[Any]):
    """The share of this process in the items of another sampler; on the client all of them.

    Workers take turns. A batch goes to one worker of each system, which takes its system's rows of it; an index goes to
    one of all workers. A pass continues where the one before ended: batch t, over all passes, is that of step t.

    Args:
        data_source: A BatchSampler, or a sampler of indices.

    Reference: release 2.10, `cerebras.pytorch.utils.data.sampler`.
    """

    def __init__(self, data_source: Sampler[int] | Iterable[Any]) -> None:
        self._data_source = data_source
        self._has_batches = isinstance(data_source, BatchSampler | torch.utils.data.BatchSampler)
        rank = streaming.get_streaming_rank()
        self._num_turns = streaming.num_workers_per_csx() if self._has_batches else streaming.num_tasks()
        self._own_turn = rank % self._num_turns
        self._turn = 0

    def restart(self) -> None:
        """Makes the next item the first worker's."""
        self._turn = 0

    def __len__(self) -> int:
        items = len(self._data_source)  # type: ignore[arg-type]  # a TypeError says so
        before = (self._own_turn - self._turn) % self._num_turns
        return max(0, -(-(items - before) // self._num_turns))

    def __iter__(self) -> Iterator[Any]:
        for item in self._data_source:
            is_own = self._turn == self._own_turn
            self._turn = (self._turn + 1) % self._num_turns
            if is_own:
                yield self._rows(item) if self._has_batches else item

    def _rows(self, batch: Any) -> Any:
        wafer = streaming.streaming_wafer()
        share, left_over = divmod(len(batch), streaming.num_csx())
        begin = wafer * share + min(wafer, left_over)
        return batch[begin : begin + share + (1 if wafer < left_over else 0)]


class DistributedSampler(Sampler[Any]):
    """Batches, or indices, in an order that does not depend on the number of systems and workers.

    With a batch_size it is the `batch_sampler` of a torch DataLoader: the batch of a step has the same samples in the
    same order, however many systems share it and workers take turns. Without, it is a `sampler`, and indices are dealt
    to the workers one by one.

    Args:
        data_source: A map-style data set.
        shuffle: Whether each pass has an order of its own, given by the seed and the number of the pass.
        seed: The seed; None: drawn from torch's generator, alike in all workers.
        start_index: The number of samples, of all passes and workers, that are left out at the beginning.
        shard: Whether this process gets its share only; False: every worker gets all.
        batch_size: The rows of the batch of a step, over all systems; None: indices.
        drop_last: Whether samples that do not fill a batch, or without a batch_size do not go round all workers, are
            left out.
        num_samples: The samples of a pass; None: as many as the data set has.
        pad_last: Whether a smaller last batch is filled with `pad_index`; only with a batch_size, and without
            drop_last.

    Raises:
        ValueError: A number is out of range.

    Example:
        In an input_fn::

            sampler = cstorch.utils.data.DistributedSampler(dataset, batch_size=64)
            return torch.utils.data.DataLoader(dataset, batch_sampler=sampler)

    Reference: release 2.10, `cerebras.pytorch.utils.data`.
    """

    pad_index = pad_index

    def __init__(
        self,
        data_source: Dataset[Any],
        shuffle: bool = True,
        seed: int | None = None,
        start_index: int = 0,
        shard: bool = True,
        batch_size: int | None = None,
        drop_last: bool = True,
        num_samples: int | None = None,
        pad_last: bool = False,
    ) -> None:
        if batch_size is None and drop_last and shard:
            samples = len(data_source) if num_samples is None else num_samples  # type: ignore[arg-type]
            num_samples = samples - samples % streaming.num_tasks()
        self._shuffled = ShuffleSampler(data_source, num_samples, shuffle, seed)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._pad_last = pad_last and not drop_last and batch_size is not None
        self._sharded: ShardedSampler | None = None
        self._sampler: Sampler[Any] = self._shuffled
        if batch_size is not None:
            self._sampler = BatchSampler(self._sampler, batch_size, drop_last, self._pad_last)
        if shard:
            self._sampler = self._sharded = ShardedSampler(self._sampler)
        self.set_state(start_index)

    def set_state(self, start_index: int) -> None:
        """Makes the next pass begin after a number of samples, as restartable loaders do.

        A pass whose last samples were dropped, or padded, counts with the samples that were streamed.

        Args:
            start_index: The number of samples, of all passes and workers.
        """
        used = self._shuffled.num_samples
        if self._batch_size is not None and (self._drop_last or self._pad_last):
            batches = used // self._batch_size if self._drop_last else -(-used // self._batch_size)
            used = max(1, batches) * self._batch_size
        self._shuffled.set_start(start_index, used)
        if self._sharded is not None:
            self._sharded.restart()

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # each of ours has one

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sampler)
