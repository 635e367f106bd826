"""The first batch of a torch DataLoader with workers, made in this process; its state is restored afterwards."""

import functools
import random
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cstorch._internal.random_state import random_state, set_random_state

# --- Snapshots of datasets --------------------------------------------------------------------------------------------

# A container of more items has samples: their order is restored, and the items themselves are not saved.
_MOST_ITEMS: Final = 1000
# Larger arrays and tensors have samples too, which a read does not change.
_COPIED_BYTES: Final = 64 * 2**20

_LEAVES: Final = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, torch.dtype)


class Snapshot:
    """The contents of all objects that others refer to: attributes, items, states of generators, and small arrays.

    Objects are neither copied nor replaced, so that all references stay valid.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._restorers: list[Callable[[], None]] = []
        self._left_bytes = _COPIED_BYTES
        self._kept: list[Any] = []  # alive, so that no other object gets the same id
        seen: set[int] = set()
        waiting = deque(roots)  # breadth first: the bytes that may be copied go to near objects
        while waiting:
            value = waiting.popleft()
            if isinstance(value, _LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))
            self._kept.append(value)
            waiting.extend(self._take(value))

    def restore(self) -> None:
        """Restores the contents."""
        for restorer in self._restorers:
            restorer()

    def _take(self, value: Any) -> Iterator[Any]:
        """Saves the contents of an object; yields the objects that it refers to."""
        if isinstance(value, np.ndarray | torch.Tensor):
            self._take_array(value)
            return
        if (generator := _generator(value)) is not None:
            self._restorers.append(generator)
            return
        if isinstance(value, list | deque):
            items = list(value)
            self._restorers.append(functools.partial(_restore_list, value, items))
            yield from items if len(items) <= _MOST_ITEMS else ()
        elif isinstance(value, dict):
            self._restorers.append(functools.partial(_restore_dict, value, dict(value)))
            yield from value.values() if len(value) <= _MOST_ITEMS else ()
        elif isinstance(value, set):
            self._restorers.append(functools.partial(_restore_set, value, set(value)))
        elif isinstance(value, tuple):
            yield from value if len(value) <= _MOST_ITEMS else ()
        elif isinstance(value, types.CellType):
            try:
                content = value.cell_contents
            except ValueError:  # the cell is empty
                return
            self._restorers.append(lambda: setattr(value, "cell_contents", content))
            yield content
        elif isinstance(value, types.MethodType):
            yield value.__self__
        elif isinstance(value, types.FunctionType):
            yield from value.__closure__ or ()
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(value, types.FunctionType):
            yield attributes

    def _take_array(self, value: np.ndarray[Any, Any] | torch.Tensor) -> None:
        if value.nbytes > self._left_bytes:
            return
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
                return
            tensor, before = value.detach(), value.detach().clone()
            self._restorers.append(lambda: None if torch.equal(tensor, before) else _copy(tensor, before))
        else:
            if type(value) is not np.ndarray or value.dtype.hasobject or not value.flags.writeable:
                return
            array, old = value, value.copy()
            self._restorers.append(lambda: None if np.array_equal(array, old) else np.copyto(array, old))
        self._left_bytes -= value.nbytes


def _generator(value: Any) -> Callable[[], None] | None:
    """Returns the function that restores a random generator; None for other objects."""
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, torch.Generator):
        return functools.partial(_set_generator, value, value.get_state())
    return None


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _copy(tensor: torch.Tensor, source: torch.Tensor) -> None:
    tensor.copy_(source)


def _same(now: Iterable[Any], before: Iterable[Any]) -> bool:
    now, before = list(now), list(before)
    return len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True))


def _restore_list(value: Any, items: list[Any]) -> None:
    if not _same(value, items):
        value.clear()
        value.extend(items)


def _restore_dict(value: dict[Any, Any], items: dict[Any, Any]) -> None:
    if not (_same(value, items) and _same(value.values(), items.values())):
        value.clear()
        value.update(items)


def _restore_set(value: set[Any], items: set[Any]) -> None:
    if value != items:
        value.clear()
        value.update(items)


# --- Workers in this process ------------------------------------------------------------------------------------------
#
# A process with gRPC must not be forked: its other threads hold locks that would stay locked in the child, and gRPC's
# fork handlers wait for them. A new interpreter would import torch and all modules of the input_fn for every execution.
# So this process makes the batches of each worker, with the worker's seeds, worker_init_fn and `get_worker_info`, and
# restores its own state.


@contextmanager
def workers_in_process() -> Iterator[None]:
    """Context in which torch DataLoaders in this thread start no processes, and yield the same batches."""
    thread, original = threading.get_ident(), TorchLoader._get_iterator
    iterated: list[TorchLoader[Any]] = []

    def get_iterator(loader: TorchLoader[Any]) -> _BaseDataLoaderIter:
        if loader.num_workers == 0 or threading.get_ident() != thread:
            return original(loader)
        iterated.append(loader)
        return InProcessIterator(loader)

    TorchLoader._get_iterator = get_iterator  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        TorchLoader._get_iterator = original  # type: ignore[method-assign]
        for loader in iterated:
            loader._iterator = None  # persistent_workers keeps it


class InProcessIterator(_BaseDataLoaderIter):
    """An iterator over batches of workers in turn, in the order of torch's iterator over processes."""

    def __init__(self, loader: TorchLoader[Any]) -> None:
        super().__init__(loader)  # draws the workers' seed
        self.wrap_fetcher: Callable[[Any], Any] | None = None  # applied to the fetcher of each worker
        self._all = [_Worker(self, loader, number) for number in range(loader.num_workers)]
        self._working = deque(self._all)  # the next worker first; workers of an IterableDataset end one by one
        self._ahead = (loader.prefetch_factor or 1) * loader.num_workers
        self._indices = deque(self._sample(self._ahead))

    def _sample(self, count: int) -> list[Any]:
        """Takes indices, or batches of them, as early as torch does, since samplers draw random numbers."""
        return list(islice(self._sampler_iter, count))

    def _reset(self, loader: TorchLoader[Any], first_iter: bool = False) -> None:
        """Begins another pass with the same workers, which are not initialised again."""
        super()._reset(loader, first_iter)
        self._working = deque(self._all)
        for worker in self._all:
            worker.begin_pass()
        self._indices = deque(self._sample(self._ahead))

    def _next_data(self) -> Any:
        while self._working and self._indices:
            worker, index = self._working.popleft(), self._indices.popleft()
            try:
                data = worker.fetch(index)
            except StopIteration:
                if self._dataset_kind != _DatasetKind.Iterable:
                    raise
                continue
            finally:
                self._indices.extend(self._sample(1))
            self._working.append(worker)
            return data
        raise StopIteration


class _Worker:
    """A worker, with its own generators and its own state of the dataset, as in a process."""

    def __init__(self, iterator: Any, loader: TorchLoader[Any], number: int) -> None:
        self._iterator = iterator
        self._init_fn = loader.worker_init_fn
        self._info = torch_worker.WorkerInfo(
            id=number, num_workers=loader.num_workers, seed=iterator._base_seed + number, dataset=iterator._dataset
        )
        self._shared = (iterator._dataset, self._init_fn, iterator._collate_fn)
        self._random: dict[str, Any] | None = None  # the state of its generators; None until it is initialised
        self._own = Snapshot(())  # the contents of its dataset
        self._fetcher: Any = None

    def begin_pass(self) -> None:
        """Begins another iteration of the dataset."""
        self._fetcher = None

    def fetch(self, index: Any) -> Any:
        """Returns a batch. Raises StopIteration at the end of an IterableDataset."""
        iterator = self._iterator
        outside, shared, threads = random_state(), Snapshot(self._shared), torch.get_num_threads()
        try:
            torch.set_num_threads(1)  # as in a worker process: more threads would sum in another order
            torch_worker._worker_info = self._info
            if self._random is None:
                self._seed()
                if self._init_fn is not None:
                    self._init_fn(self._info.id)
            else:
                set_random_state(self._random)
                self._own.restore()
            if self._fetcher is None:
                self._fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
                    iterator._dataset_kind,
                    iterator._dataset,
                    iterator._auto_collation,
                    iterator._collate_fn,
                    iterator._drop_last,
                )
                if iterator.wrap_fetcher is not None:
                    self._fetcher = iterator.wrap_fetcher(self._fetcher)
            return self._fetcher.fetch(index)
        finally:
            self._random, self._own = random_state(), Snapshot(self._shared)
            torch_worker._worker_info = None
            torch.set_num_threads(threads)
            set_random_state(outside)
            shared.restore()

    def _seed(self) -> None:
        seed = self._info.seed
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(torch_worker._generate_state(seed - self._info.id, self._info.id))  # type: ignore[no-untyped-call]
