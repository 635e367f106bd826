"""What a check finds out of a loader: its busiest line, its last batch, and what two workers share."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cstorch
from cstorch._internal.check.loader import BusyLines, line_of_input, partial_batch, shared_samples
from cstorch.distributed import streaming

SAMPLES = TensorDataset(torch.arange(70))


@pytest.mark.parametrize("steps", [5, 100])
def test_partial_batch(steps: int) -> None:
    what = partial_batch(DataLoader(SAMPLES, batch_size=16), steps)
    assert what.startswith("batch 5 of a pass has 6 rows and the others have 16, as there are 70 samples")


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.zeros(2)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(SAMPLES, batch_size=16, drop_last=True),
        DataLoader(SAMPLES, batch_size=10),
        DataLoader(SAMPLES, batch_size=None),
        DataLoader(Endless(), batch_size=16),
        [torch.zeros(16)],
    ],
)
def test_no_partial_batch(loader: Iterable[object]) -> None:
    assert partial_batch(loader, 100) == ""


def test_no_partial_batch_within_the_steps() -> None:
    assert partial_batch(DataLoader(SAMPLES, batch_size=16), 4) == ""


def made_in_two_lines() -> DataLoader[tuple[torch.Tensor, ...]]:
    samples = TensorDataset(torch.arange(64))
    return DataLoader(samples, batch_size=16)  # of the torch DataLoader


def generated() -> Iterator[torch.Tensor]:
    while True:
        yield torch.zeros(16)  # of the generator


def listed() -> list[torch.Tensor]:  # of a list
    return [torch.zeros(16)]


@pytest.mark.parametrize(
    ("input_fn", "which"),
    [(made_in_two_lines, "of the torch DataLoader"), (generated, "of the generator"), (listed, "of a list")],
)
def test_line_of_input(input_fn: Callable[[], Iterable[Any]], which: str) -> None:
    loader = cstorch.utils.data.DataLoader(input_fn)
    loader.first_batch()
    lines = Path(__file__).read_text().splitlines()
    (expected,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {which}")]
    made_at = {loader.dataloader: f"made.py:{expected}"} if which == "of the torch DataLoader" else {}
    assert line_of_input(loader, made_at).endswith(f".py:{expected}")


def test_busiest_line() -> None:
    busy = BusyLines()
    with busy:
        time.sleep(0.1)  # the line
    lines = Path(__file__).read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith("# the line")]
    assert busy.busiest.endswith(f"test_check_loader.py:{line}")


def whole_batches() -> list[torch.Tensor]:
    return [torch.arange(8)]


def part_without_rank() -> list[torch.Tensor]:
    return [torch.arange(cstorch.distributed.get_streaming_batch_size(8))]


def part_by_rank() -> list[torch.Tensor]:
    rank, workers = cstorch.distributed.get_streaming_rank(), max(1, cstorch.distributed.num_streamers())
    rows = cstorch.distributed.get_streaming_batch_size(8)
    return [torch.arange(8 * workers)[rank::workers][:rows]]


def rank_in_vain() -> list[torch.Tensor]:
    cstorch.distributed.get_streaming_rank()
    return [torch.arange(cstorch.distributed.get_streaming_batch_size(8))]


@pytest.mark.parametrize(
    ("input_fn", "is_shared"),
    [(whole_batches, False), (part_without_rank, True), (part_by_rank, False), (rank_in_vain, True)],
)
def test_shared_samples(
    input_fn: Callable[[], list[torch.Tensor]], is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_asked", bytearray(3))  # an earlier test may have asked
    loader = cstorch.utils.data.DataLoader(input_fn)
    assert len(loader.first_batch()) == 8
    assert bool(shared_samples(loader, 8)) == is_shared
    assert not cstorch.distributed.is_streamer()
