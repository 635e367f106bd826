"""Samplers: one order, however many systems and workers take their shares of it."""

import copy
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from cstorch.utils.data import DistributedSampler
from cstorch.utils.data.sampler import BatchSampler, ShardedSampler, ShuffleSampler, pad_index
from waferbox.input_process.messages import INPUT_VARIABLE, InputSettings, encode

CLUSTERS = [(1, 1), (1, 3), (2, 1), (2, 2), (4, 2)]


def dataset(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


def be_streamer(monkeypatch: pytest.MonkeyPatch, num_csx: int, workers: int, wafer: int, worker: int) -> None:
    settings = InputSettings(
        worker=worker, num_workers=workers, wafer=wafer, num_csx=num_csx, half_type="", mixed_precision=False
    )
    monkeypatch.setenv(INPUT_VARIABLE, encode(settings).decode())


def endless(sampler: DistributedSampler) -> Iterator[list[int]]:
    while True:
        yield from sampler


def merged(
    monkeypatch: pytest.MonkeyPatch, num_csx: int, workers: int, steps: int, **settings: Any
) -> list[list[object]]:
    """The global batches of the first steps: step t comes from worker t of each system, whose rows lie in order."""
    batches: list[list[object]] = [[] for _ in range(steps)]
    for wafer in range(num_csx):
        for worker in range(workers):
            with monkeypatch.context() as patch:
                be_streamer(patch, num_csx, workers, wafer, worker)
                own = endless(DistributedSampler(dataset(21), seed=3, batch_size=4, **settings))
                for step in range(worker, steps, workers):
                    batches[step].extend(next(own))
    return batches


@pytest.mark.parametrize("start_index", [0, 12, 20, 28])
@pytest.mark.parametrize(
    "settings",
    [{}, {"shuffle": False}, {"drop_last": False, "pad_last": True}, {"num_samples": 9}, {"num_samples": 30}],
    ids=str,
)
def test_the_order_does_not_depend_on_the_cluster(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], start_index: int
) -> None:
    alone = list(islice(endless(DistributedSampler(dataset(21), seed=3, batch_size=4, **settings)), 24))
    expected = alone[start_index // 4 :][:13]
    for num_csx, workers in CLUSTERS:
        assert merged(monkeypatch, num_csx, workers, 13, start_index=start_index, **settings) == expected


def test_every_pass_is_shuffled_anew_and_whole() -> None:
    sampler = DistributedSampler(dataset(20), seed=3, batch_size=4)
    first, second = list(sampler), list(sampler)
    assert len(sampler) == len(first) == 5
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(20))
    assert first != second
    again = DistributedSampler(dataset(20), seed=3, batch_size=4)
    assert [list(again), list(again)] == [first, second]
    assert list(DistributedSampler(dataset(20), seed=4, batch_size=4)) != first


def test_without_a_seed_all_workers_draw_the_same() -> None:
    orders = []
    for _ in range(2):
        torch.manual_seed(11)
        orders.append(list(DistributedSampler(dataset(20))))
    assert orders[0] == orders[1] != list(range(20))


def test_what_does_not_fill_a_batch() -> None:
    plain: dict[str, Any] = {"shuffle": False, "batch_size": 4}
    assert list(DistributedSampler(dataset(6), **plain)) == [[0, 1, 2, 3]]
    assert list(DistributedSampler(dataset(6), drop_last=False, **plain)) == [[0, 1, 2, 3], [4, 5]]
    sampler = DistributedSampler(dataset(6), drop_last=False, pad_last=True, **plain)
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, sampler.pad_index, sampler.pad_index]]
    # As pickle does, which takes it to the processes of a torch DataLoader.
    assert copy.deepcopy(sampler.pad_index) is sampler.pad_index is pad_index


def test_indices_are_dealt_to_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    own = []
    for wafer in range(2):
        for worker in range(2):
            be_streamer(monkeypatch, 2, 2, wafer, worker)
            sampler = DistributedSampler(dataset(10), shuffle=False)
            assert len(sampler) == 2
            own.append(list(sampler))
            assert list(DistributedSampler(dataset(10), shuffle=False, shard=False)) == list(range(10))
    assert own == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_pass_that_does_not_go_round_is_continued_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    be_streamer(monkeypatch, 1, 2, 0, 1)
    sampler = ShardedSampler(BatchSampler(range(6), 2, drop_last=False, pad_last=False))
    assert [(len(sampler), list(sampler)) for _ in range(2)] == [(1, [[2, 3]]), (2, [[0, 1], [4, 5]])]


def test_a_state_is_a_count_of_samples() -> None:
    sampler = DistributedSampler(dataset(21), seed=3, batch_size=4)
    batches = [*sampler, *sampler]
    sampler.set_state(28)
    assert len(sampler) == 3
    assert list(sampler) == batches[7:]


@pytest.mark.parametrize("settings", [{"num_samples": 0}, {"start_index": -1}])
def test_numbers_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"num_samples=0|start_index must not be negative, got -1"):
        ShuffleSampler(dataset(5), **settings)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        BatchSampler(range(3), 0, drop_last=True, pad_last=False)
