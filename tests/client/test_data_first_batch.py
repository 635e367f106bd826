"""The first batch on the client: that of a torch DataLoader with processes, made without any."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from cstorch._internal.loader_processes import Snapshot, workers_in_process
from cstorch._internal.random_state import random_state, set_random_state
from cstorch.utils.data import DataLoader

LENGTH = 12
EIGHT: Any = range(8)  # the stubs want a Dataset, and any sequence will do


class Augmented(Dataset[Any]):
    """Draws from every generator that there is; some are made by the worker_init_fn."""

    rng: np.random.Generator

    def __init__(self) -> None:
        self.own = random.Random(7)
        self.order = list(range(LENGTH))
        self.offsets = np.arange(LENGTH)
        self.inner: dict[str, Any] = {"handle": None, "calls": 0}

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.inner["calls"] += 1
        drawn = [self.rng.random(), np.random.rand(), random.random(), torch.rand(()).item(), self.own.random()]
        worker = get_worker_info()
        assert worker is not None
        assert worker.dataset is self
        places = [index, self.order[index], self.offsets[index], self.inner["calls"], worker.id, worker.num_workers]
        return torch.tensor([*drawn, *places], dtype=torch.float64)


def initialise(worker_id: int) -> None:
    worker = get_worker_info()
    assert worker is not None
    assert worker.id == worker_id
    dataset = worker.dataset
    assert isinstance(dataset, Augmented)
    dataset.rng = np.random.default_rng(worker.seed)
    dataset.own.seed(worker_id)
    dataset.rng.shuffle(dataset.order)
    dataset.rng.shuffle(dataset.offsets)
    dataset.inner["handle"] = object()


class Divided(IterableDataset[Any]):
    """The range of the worker; init_divided sets it."""

    def __init__(self, shares: list[int]) -> None:
        self.shares = shares
        self.start, self.end = 0, sum(shares)

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.start, self.end):
            yield torch.tensor([number, torch.rand(()).item()], dtype=torch.float64)


def divide(worker_id: int) -> None:
    worker = get_worker_info()
    assert worker is not None
    dataset = worker.dataset
    assert isinstance(dataset, Divided)
    dataset.start += sum(dataset.shares[:worker_id])
    dataset.end = dataset.start + dataset.shares[worker_id]


def augmented(num_workers: int, **options: Any) -> TorchLoader[Any]:
    return TorchLoader(
        Augmented(), batch_size=2, shuffle=True, num_workers=num_workers, worker_init_fn=initialise, **options
    )


def divided(*shares: int, batch_size: int | None = 2) -> TorchLoader[Any]:
    return TorchLoader(Divided(list(shares)), batch_size, num_workers=len(shares), worker_init_fn=divide)


def by_closure() -> TorchLoader[Any]:
    dataset = Augmented()

    def initialise_it(worker_id: int) -> None:
        dataset.rng = np.random.default_rng(worker_id)

    return TorchLoader(dataset, batch_size=3, num_workers=2, worker_init_fn=initialise_it)


def of_others() -> Iterator[Any]:
    """A generator that iterates loaders of its own, each batch with two of theirs."""
    yield from zip(augmented(2), augmented(3), strict=True)


def collating() -> TorchLoader[Any]:
    def collate(rows: list[Any]) -> Any:
        return {"rows": torch.stack(rows), "noise": torch.rand(2)}

    return TorchLoader(
        EIGHT, batch_size=4, num_workers=2, collate_fn=lambda rows: collate(list(map(torch.tensor, rows)))
    )


LOADERS: dict[str, Callable[[], Any]] = {
    "one process": lambda: augmented(1),
    "three processes": lambda: augmented(3),
    "another context": lambda: augmented(2, multiprocessing_context="fork", prefetch_factor=3, timeout=60),
    "a generator of its own": lambda: augmented(2, generator=torch.Generator().manual_seed(3)),
    "persistent": lambda: augmented(2, persistent_workers=True),
    "a closure": by_closure,
    "parts": lambda: divided(4, 4),
    "unlike parts": lambda: divided(5, 1, 3),
    "nothing for the first": lambda: divided(0, 4),
    "batches of the data set": lambda: divided(2, 3, batch_size=None),
    "loaders within": of_others,
    "a collate function": collating,
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(equal(one[key], other[key]) for key in one | other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    before = random_state()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    yield
    set_random_state(before)


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_batches_are_those_of_torchs_processes(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = random_state()
    loader = make()
    plain = list(loader)
    drawn = torch.rand(3), np.random.rand(3)
    second = list(islice(loader, 3))
    set_random_state(before)
    first = DataLoader(make).first_batch()
    assert equal(first, plain[0])
    set_random_state(before)
    with workers_in_process():
        monkeypatch.setattr(torch.multiprocessing.Process, "start", pytest.fail)
        loader = make()
        ours = list(loader)
        assert equal(ours, plain)
        assert torch.equal(torch.rand(3), drawn[0])
        assert (np.random.rand(3) == drawn[1]).all()
        assert equal(list(islice(loader, 3)), second)
    assert get_worker_info() is None


def test_the_data_set_is_as_it_was() -> None:
    loader = augmented(2, persistent_workers=True)
    dataset = loader.dataset
    assert isinstance(dataset, Augmented)
    untouched, threads = Augmented(), torch.get_num_threads()
    inner, order, offsets = dataset.inner, dataset.order, dataset.offsets
    firsts = []
    for _ in range(2):
        torch.manual_seed(1)
        firsts.append(DataLoader(lambda: loader).first_batch())
        assert not hasattr(dataset, "rng")
        assert (dataset.inner, dataset.order) == (untouched.inner, untouched.order)
        assert (dataset.offsets == untouched.offsets).all()
        assert dataset.own.getstate() == untouched.own.getstate()
        assert dataset.inner is inner
        assert dataset.order is order
        assert dataset.offsets is offsets
    assert torch.equal(*firsts)
    assert loader.num_workers == 2
    assert loader._iterator is None
    assert torch.get_num_threads() == threads


def test_what_the_worker_init_fn_raises_is_raised() -> None:
    def fail(worker_id: int) -> None:
        raise OSError(f"no files for {worker_id}")

    loader = DataLoader(lambda: TorchLoader(EIGHT, num_workers=2, worker_init_fn=fail))
    with pytest.raises(OSError, match="no files for 0"):
        loader.first_batch()
    assert get_worker_info() is None


def test_objects_hold_again_what_they_held() -> None:
    class Held:
        added: torch.Tensor

        def __init__(self, cell: list[int]) -> None:
            self.items: list[Any] = [cell, 2]
            self.queue, self.names = deque([3]), {4}
            self.generators = (np.random.RandomState(1), torch.Generator().manual_seed(1), np.random.default_rng(1))
            self.tensor = torch.zeros(3)
            self.held = self

    cell = [1]
    held = Held(cell)
    numpy, own, newer = held.generators
    snapshot = Snapshot([held])
    first = (numpy.rand(), torch.rand(2, generator=own).tolist(), newer.random())
    cell.append(5)
    held.items.reverse()
    held.queue.popleft()
    held.names.add(6)
    held.tensor += 1
    held.added = held.tensor
    snapshot.restore()
    assert held.items == [[1], 2]
    assert held.items[0] is cell
    assert (list(held.queue), held.names) == ([3], {4})
    assert held.tensor.tolist() == [0, 0, 0]
    assert not hasattr(held, "added")
    assert first == (numpy.rand(), torch.rand(2, generator=own).tolist(), newer.random())


def test_batch_size_before_the_first_batch() -> None:
    made = []

    def input_fn(**options: Any) -> Any:
        made.append(1)
        return TorchLoader(EIGHT, **options)

    loader = DataLoader(input_fn, batch_size=4)
    assert [loader.batch_size, len(loader), loader.batch_size] == [4, 2, 4]
    assert len(made) == 1
    assert DataLoader(input_fn, batch_sampler=torch.utils.data.BatchSampler(range(8), 2, False)).batch_size == 2
    assert DataLoader(input_fn, batch_size=None).batch_size is None
    assert DataLoader(lambda: [torch.zeros(3)]).batch_size is None
