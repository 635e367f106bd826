"""First batches without values: their shapes are those of whole batches, of which few samples are made."""

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Subset
from torch.utils.data import DataLoader as TorchLoader

from cstorch._internal import sparing_fetcher
from cstorch._internal.random_state import random_state, random_state_kept, same_random_state
from cstorch.utils.data import DataLoader

SAMPLES = 100
FEW = 8

Pair = namedtuple("Pair", "image label")


@pytest.fixture(autouse=True)
def _small_batches_are_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sparing_fetcher, "_LEAST_BYTES", 1)
    with random_state_kept():
        yield


class Made(Dataset[Any]):
    """Samples that a function makes of their numbers."""

    def __init__(self, make: Callable[[int], Any], count: int = SAMPLES) -> None:
        self.make = make
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.make(index)


class Streamed(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.full((3,), index) for index in range(self.count))


def image(index: int) -> torch.Tensor:
    return torch.full((3, 4), float(index))


def crops(samples: list[Any]) -> Any:
    """Two crops of each sample along dimension 0, and one mask for all."""
    return {"crops": torch.cat([torch.stack(samples)] * 2), "mask": torch.ones(5, 5, dtype=torch.bool)}


def with_class_token(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.zeros(1, 3, 4), *(sample[None] for sample in samples)])


def emptied(samples: list[dict[str, Any]]) -> Any:
    """Changes the samples in place."""
    labels = torch.tensor([sample.pop("label") for sample in samples])
    for sample in samples:
        sample["array"] += 1
    return torch.stack([torch.from_numpy(sample["array"]) for sample in samples]), labels


class Numbered:
    """A collate function with a state."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.batches += 1
        return torch.stack(samples)


def padded(samples: list[Any]) -> torch.Tensor:
    return pad_sequence([torch.as_tensor(sample) for sample in samples], batch_first=True)


def numbered_letters(samples: list[str]) -> torch.Tensor:
    return padded([[ord(letter) for letter in sample] for sample in samples])


def loader_of(make: Callable[[int], Any], **options: Any) -> TorchLoader[Any]:
    return TorchLoader(Made(make), **{"batch_size": 32, **options})


SPARED: dict[str, Callable[[], TorchLoader[Any]]] = {
    "tensors": lambda: loader_of(image, shuffle=True),
    "pairs": lambda: loader_of(lambda index: (image(index), index)),
    "named pairs": lambda: loader_of(lambda index: Pair(image(index), np.int32(index))),
    "nested": lambda: loader_of(lambda index: {"a": [image(index), {"b": index / 2}], "c": np.arange(6, dtype="i2")}),
    "worker processes": lambda: loader_of(lambda index: torch.rand(3), num_workers=2, persistent_workers=True),
    "crops": lambda: loader_of(image, collate_fn=crops),
    "a base and a slope": lambda: loader_of(image, collate_fn=with_class_token),
    "the batch as dimension 1": lambda: loader_of(image, collate_fn=lambda samples: torch.stack(samples, dim=1)),
    "samples that are changed": lambda: loader_of(
        lambda index: {"array": np.zeros(3), "label": index}, collate_fn=emptied
    ),
    "a dataset shorter than the batch": lambda: loader_of(image, batch_size=SAMPLES + 20),
    "indices all at once": lambda: TorchLoader(Subset(Made(image), range(1, 90)), batch_size=40),
    "a batch sampler": lambda: TorchLoader(Made(image), batch_sampler=BatchSampler(range(50, 90), 30, drop_last=False)),
    "a stream": lambda: TorchLoader(Streamed(90), batch_size=40),
    "a short stream": lambda: TorchLoader(Streamed(30), batch_size=40, num_workers=1),
    "a stream of just the few": lambda: TorchLoader(Streamed(FEW), batch_size=40),
}


def lengthened(after: int) -> Callable[[int], torch.Tensor]:
    return lambda index: torch.ones(5 + (index >= after))


WHOLE: dict[str, Callable[[], TorchLoader[Any]]] = {
    "few samples": lambda: loader_of(image, batch_size=FEW),
    "no batches": lambda: loader_of(image, batch_size=None),
    "padding": lambda: loader_of(lambda index: torch.ones(index % 7 + 1), collate_fn=padded),
    "samples sorted by length": lambda: loader_of(lengthened(20), collate_fn=padded),
    "text": lambda: loader_of(lambda index: "word " * index, collate_fn=numbered_letters),
    "lists": lambda: loader_of(lambda index: [1] * (index % 5 + 1), collate_fn=padded),
    "numbers beside the tensors": lambda: loader_of(image, collate_fn=lambda samples: (torch.stack(samples), 0.5)),
    "a share of the batch": lambda: loader_of(image, collate_fn=lambda samples: torch.ones(len(samples) // 2)),
    "a rare share of the batch": lambda: loader_of(image, collate_fn=lambda samples: torch.ones(len(samples) // 10)),
    "a square of the batch": lambda: loader_of(image, collate_fn=lambda samples: torch.eye(len(samples))),
    "a structure by the size": lambda: loader_of(image, collate_fn=lambda samples: samples),
    "a type by the size": lambda: loader_of(
        image, collate_fn=lambda samples: torch.ones(2, dtype=torch.int32 if len(samples) > 3 else torch.int64)
    ),
    "whole batches only": lambda: loader_of(image, collate_fn=lambda samples: torch.stack(samples).reshape(4, -1, 12)),
    "sparse tensors": lambda: loader_of(image, collate_fn=lambda samples: torch.stack(samples).to_sparse()),
    "a short stream": lambda: TorchLoader(Streamed(FEW - 2), batch_size=40),
}


def shapes(batch: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: (tensor.shape, tensor.dtype, tensor.layout), batch)


def is_spared(batch: Any) -> bool:
    devices = {leaf.device.type for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)}
    assert len(devices) == 1
    return devices == {"meta"}


@pytest.mark.parametrize("make", SPARED.values(), ids=SPARED.keys())
def test_shapes_are_those_of_the_whole_batch(make: Callable[[], TorchLoader[Any]]) -> None:
    whole = next(iter(make()))
    batch = DataLoader(make).first_batch(has_values=False)
    assert is_spared(batch)
    assert shapes(batch) == shapes(whole)


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE.keys())
def test_other_batches_are_whole(make: Callable[[], TorchLoader[Any]]) -> None:
    whole = next(iter(make()))
    batch = DataLoader(make).first_batch(has_values=False)
    assert not is_spared(batch)
    assert shapes(batch) == shapes(whole)
    dense = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to_dense().tolist(), (batch, whole))
    assert dense[0] == dense[1]


def test_few_samples_are_made() -> None:
    dataset = Made(image)
    batch = DataLoader(lambda: TorchLoader(dataset, batch_size=64)).first_batch(has_values=False)
    assert batch.shape == (64, 3, 4)
    assert dataset.read == [*range(FEW), 63]


def test_batches_below_the_limit_are_made_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 32 * image(0).nbytes
    for least, spared in ((nbytes, True), (nbytes + 1, False)):
        monkeypatch.setattr(sparing_fetcher, "_LEAST_BYTES", least)
        dataset = Made(image)
        batch = DataLoader(lambda made=dataset: TorchLoader(made, batch_size=32)).first_batch(has_values=False)
        assert is_spared(batch) == spared
        assert spared or dataset.read == list(range(32))


def test_batches_with_values_are_whole() -> None:
    assert not is_spared(DataLoader(SPARED["tensors"]).first_batch())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_numbers_of_the_script_are_those_after_a_whole_batch(num_workers: int) -> None:
    def make() -> TorchLoader[Any]:
        return loader_of(lambda index: torch.rand(3), collate_fn=noisy, num_workers=num_workers)

    def noisy(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + np.random.rand()

    with random_state_kept():
        whole = DataLoader(make).first_batch()
        expected = random_state()
    batch = DataLoader(make).first_batch(has_values=False)
    assert same_random_state(random_state(), expected)
    # A worker has generators of its own; without one, the script's would lack the numbers of the other samples.
    assert is_spared(batch) == (num_workers > 0)
    assert is_spared(batch) or torch.equal(batch, whole)


def test_the_state_of_the_collate_function_is_restored() -> None:
    collate = Numbered()
    batch = DataLoader(lambda: loader_of(image, collate_fn=collate)).first_batch(has_values=False)
    assert is_spared(batch)
    assert collate.batches == 0


@pytest.mark.parametrize("count", [FEW, 30])
def test_a_last_batch_that_is_dropped_is_none(count: int) -> None:
    loader = TorchLoader(Streamed(count), batch_size=40, drop_last=True)
    assert list(loader) == []
    iterator = iter(loader)
    sparing_fetcher.spare_samples(iterator)
    assert list(iterator) == []


def test_all_batches_of_a_pass_have_their_shapes() -> None:
    loader = TorchLoader(Streamed(70), batch_size=20)
    iterator = iter(loader)
    sparing_fetcher.spare_samples(iterator)
    assert [shapes(batch) for batch in iterator] == [shapes(batch) for batch in loader]


def test_errors_of_the_collate_function_are_those_of_the_whole_batch() -> None:
    def collate(samples: list[Any]) -> Any:
        raise ValueError(f"{len(samples)} samples")

    with pytest.raises(ValueError, match="32 samples"):
        DataLoader(lambda: loader_of(image, collate_fn=collate)).first_batch(has_values=False)


def test_loaders_that_change_batches_are_left_alone() -> None:
    class Doubled(TorchLoader[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield torch.from_numpy(np.concatenate([batch.numpy()] * 2))

    batch = DataLoader(lambda: Doubled(Made(image), batch_size=32)).first_batch(has_values=False)
    assert not is_spared(batch)
    assert batch.shape == (64, 3, 4)
