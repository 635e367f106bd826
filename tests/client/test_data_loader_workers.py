"""The first batch of a loader with worker processes, made without them: it is the one that the processes make."""

import functools
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from cstorch.utils.data import DataLoader
from cstorch.utils.data.loader_workers import without_processes

ROWS = 4


class Drawn(Dataset[Any]):
    """Samples with numbers that the worker draws, by a generator that it makes first."""

    def __len__(self) -> int:
        return 64

    def begin(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        self.rng = np.random.default_rng(info.seed + worker)

    def __getitem__(self, index: int) -> list[float]:
        return [index, self.rng.random(), random.random(), np.random.rand(), torch.rand(()).item()]

    def collate(self, rows: list[list[float]]) -> torch.Tensor:
        return torch.tensor([[*row, self.rng.random()] for row in rows], dtype=torch.float64)


class Cut(IterableDataset[Any]):
    """Each worker gives its own part; the first workers of `empty` have none."""

    def __init__(self, empty: int = 0) -> None:
        self.empty = empty

    def begin(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        self.part = range(worker if worker >= self.empty else 1000, 32, info.num_workers)

    def __iter__(self) -> Iterator[float]:
        part = self.part  # not in the generator: where the iterator is made, it has to be there
        return iter([float(number) + torch.rand(()).item() for number in part])


class Subclass(TorchLoader[Any]):
    def __iter__(self) -> Any:
        self.began = getattr(self, "began", 0) + 1
        return super().__iter__()


def seeded(worker: int) -> None:
    np.random.seed(worker + 7)


def drawn(**settings: Any) -> TorchLoader[Any]:
    dataset = Drawn()
    return TorchLoader(dataset, ROWS, worker_init_fn=dataset.begin, collate_fn=dataset.collate, **settings)


def cut(empty: int = 0, **settings: Any) -> TorchLoader[Any]:
    dataset = Cut(empty)
    return TorchLoader(dataset, ROWS, worker_init_fn=dataset.begin, **settings)


LOADERS: dict[str, Callable[[], TorchLoader[Any]]] = {
    "drawn": functools.partial(drawn, num_workers=2),
    "shuffled": functools.partial(drawn, num_workers=2, shuffle=True),
    "a generator of its own": lambda: drawn(num_workers=1, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "persistent": functools.partial(drawn, num_workers=1, persistent_workers=True, prefetch_factor=4),
    "iterable": functools.partial(cut, num_workers=3),
    "whose first workers have nothing": functools.partial(cut, 2, num_workers=3),
    "a subclass": lambda: Subclass(list(map(float, range(16))), ROWS, num_workers=2, worker_init_fn=seeded),
    "no worker": lambda: TorchLoader(torch.arange(16.0), ROWS, shuffle=True),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_first_batch_is_that_of_the_processes(name: str) -> None:
    torch.manual_seed(5)
    iterator = iter(LOADERS[name]())
    expected = next(iterator)
    del iterator
    torch.manual_seed(5)
    assert torch.equal(DataLoader(LOADERS[name]).first_batch(), expected)


def test_later_batches_are_those_of_one_worker() -> None:
    torch.manual_seed(5)
    expected = list(islice(drawn(num_workers=1), 3))
    torch.manual_seed(5)
    with without_processes(drawn(num_workers=1)) as loader:
        assert all(map(torch.equal, islice(loader, 3), expected))


def test_nothing_is_left_behind() -> None:
    loader = drawn(num_workers=2, persistent_workers=True)
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), dict(vars(loader.dataset))  # type: ignore[union-attr]
    with without_processes(loader) as inside:
        next(iter(inside))
    assert get_worker_info() is None
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[:2]  # type: ignore[union-attr]
    assert vars(loader.dataset) == before[2]
    assert "_get_iterator" not in vars(loader)
    assert loader._iterator is None
    assert loader.num_workers == 2


def test_an_error_of_the_dataset_is_as_it_is() -> None:
    def fail(worker: int) -> None:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        DataLoader(lambda: TorchLoader(Drawn(), ROWS, num_workers=1, worker_init_fn=fail)).first_batch()
    assert get_worker_info() is None


@pytest.mark.parametrize(
    ("loader", "size"),
    [
        (lambda: TorchLoader(torch.arange(16.0), 8), 8),  # type: ignore[arg-type]
        (lambda: TorchLoader(torch.arange(16.0), batch_sampler=torch.utils.data.BatchSampler(range(16), 4, True)), 4),  # type: ignore[arg-type]
        (lambda: [torch.zeros(3)], None),
    ],
)
def test_the_batch_size_before_the_first_batch(loader: Callable[[], Any], size: int | None) -> None:
    data = DataLoader(loader)
    assert data.batch_size == size
    data.batch_size = None  # the tensors of the first batch had different sizes
    assert data.batch_size is None
