"""Batches of a torch DataLoader as its worker processes would make them, made in this process."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils import worker as torch_worker

from cstorch.utils.data.random_state import random_state, set_random_state

_kinds = torch_dataloader._DatasetKind


@contextmanager
def without_processes(loader: Any) -> Iterator[Iterable[Any]]:
    """The loader, whose first batches are made in this process, one after the other.

    A process that speaks gRPC cannot be forked safely, and one batch is not worth processes. What the processes of a
    torch DataLoader would do before their first batch is done here all the same: `worker_init_fn` may make the
    generators and lists of files without which the dataset gives nothing. What it keeps in the dataset, and in the
    object whose method it is, is taken back at the end, and the generators of this process are not moved by it, as
    those of the worker processes are their own.

    Args:
        loader: what an input_fn has returned; any that has no processes of torch's is left as it is.
    """
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        yield loader
        return
    changed = [getattr(function, "__self__", None) for function in (loader.worker_init_fn, loader.collate_fn)]
    with ExitStack() as kept:
        for owner in {id(each): each for each in (loader.dataset, *changed)}.values():
            kept.enter_context(_attributes_kept(owner))
        # In the place of the method that starts processes, which a subclass may reach by its own __iter__.
        loader.__dict__["_get_iterator"] = lambda: _InProcess(loader)
        kept.callback(loader.__dict__.pop, "_get_iterator")
        if loader.persistent_workers:
            kept.callback(setattr, loader, "_iterator", loader._iterator)
        yield loader


class _InProcess(torch_dataloader._BaseDataLoaderIter):
    """An iterator of a DataLoader that does in this process what torch's worker processes do.

    All batches come from the first worker that has some: of a dataset with random access all workers give the same, and
    the others go on where the first, of an iterable one, is at its end.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        super().__init__(loader)  # draws the seed of the workers, as torch does
        self._loader = loader
        self._batches = self._all_batches()

    def _next_data(self) -> Any:
        return next(self._batches)

    def _all_batches(self) -> Iterator[Any]:
        for number in range(self._loader.num_workers):
            worker = _Worker(self._loader, number, int(self._base_seed))
            for index in self._sampler_iter:
                try:
                    batch = worker.run(partial(worker.fetch, index))
                except StopIteration:
                    break
                yield batch
            else:
                return


class _Worker:
    """What one worker process has of its own: its random numbers, its WorkerInfo, and the dataset that it reads."""

    def __init__(self, loader: "DataLoader[Any]", number: int, base_seed: int) -> None:
        self._info = torch_worker.WorkerInfo(
            id=number, num_workers=loader.num_workers, seed=base_seed + number, dataset=loader.dataset
        )
        before = random_state()
        random.seed(self._info.seed)
        torch.manual_seed(self._info.seed)
        np.random.seed(torch_worker._generate_state(base_seed, number))  # type: ignore[no-untyped-call]
        self._random_state = random_state()
        set_random_state(before)
        self._fetcher: Any = None
        self.run(partial(self._begin, loader))

    def _begin(self, loader: "DataLoader[Any]") -> None:
        if loader.worker_init_fn is not None:
            loader.worker_init_fn(self._info.id)
        self._fetcher = _kinds.create_fetcher(  # type: ignore[no-untyped-call]
            loader._dataset_kind, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
        )

    def fetch(self, index: Any) -> Any:
        """The batch of what the sampler has given; StopIteration where there is none."""
        return self._fetcher.fetch(index)

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls a function as if in the worker's process."""
        before = random_state()
        set_random_state(self._random_state)
        torch_worker._worker_info = self._info
        try:
            return function()
        finally:
            torch_worker._worker_info = None
            self._random_state = random_state()
            set_random_state(before)


@contextmanager
def _attributes_kept(owner: Any) -> Iterator[None]:
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict):
        yield
        return
    before = dict(attributes)
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(before)
