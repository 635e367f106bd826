"""The same training as plain PyTorch, on the CPU backend, and on clusters of every shape, over both lanes."""

import argparse
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from cluster_rig import RunningCluster

import cerebras.pytorch as cstorch

TOLERANCE = 1e-5  # of the largest element
RATES = {"adamw": 0.01, "sgd": 0.05}
TRAININGS = list(itertools.product(RATES, ("mean", "sum")))
SHAPES = list(itertools.product((1, 2, 4), (1, 2), (1, 2)))  # wafers, shards, workers of a wafer


def options(mode: str, folder: Path, optimizer: str, reduction: str, **more: Any) -> argparse.Namespace:
    own = {"mode": mode, "result": folder / "result", "optimizer": optimizer, "reduction": reduction}
    given = {"num_csx": 1, "shards": 1, "workers": 1, "batch_size": 24, "num_steps": 12, "max_norm": 1.0}
    return argparse.Namespace(**{**own, **given, "lr": RATES[optimizer], **more})


@functools.cache
def plain(optimizer: str, reduction: str) -> Mapping[str, Any]:
    return parity.run_plain(options("plain", Path(), optimizer, reduction))


def assert_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    assert ours["weights"].keys() == theirs["weights"].keys()
    assert_close("losses", ours["losses"], theirs["losses"])
    for name, weight in theirs["weights"].items():
        assert_close(name, ours["weights"][name], weight)


def assert_close(name: str, ours: list[Any], theirs: list[Any]) -> None:
    own, expected = torch.tensor(ours), torch.tensor(theirs)
    assert own.shape == expected.shape, name
    assert (own - expected).abs().max() <= TOLERANCE * expected.abs().max(), name


@pytest.mark.parametrize(("optimizer", "reduction"), TRAININGS)
def test_the_cpu_backend_trains_as_plain_pytorch(tmp_path: Path, optimizer: str, reduction: str) -> None:
    assert_equal(parity.run_cstorch(options("CPU", tmp_path, optimizer, reduction)), plain(optimizer, reduction))


def covering(offset: int) -> list[tuple[str, str, int, int, int]]:
    """Each shape with one training.

    Any training meets any number of wafers, of shards and of workers: for a number of wafers, the four numbers of
    shards and workers have the four trainings, and the next number of wafers has them in the next order.
    """
    return [
        (*TRAININGS[(number + number // len(TRAININGS) + offset) % len(TRAININGS)], *shape)
        for number, shape in enumerate(SHAPES)
    ]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("optimizer", "reduction", "wafers", "shards", "workers", "lane"),
    # Each lane with each shape, which with another training on the other lane: of all products, those that have each
    # pair of values.
    [(*case, "shared_memory") for case in covering(0)] + [(*case, "grpc") for case in covering(1)],
)
def test_a_cluster_trains_as_plain_pytorch(
    cluster: RunningCluster,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    optimizer: str,
    reduction: str,
    wafers: int,
    shards: int,
    workers: int,
    lane: str,
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    monkeypatch.setenv("WAFERBOX_LANE", lane)
    shape = {"num_csx": wafers, "shards": shards, "workers": workers}
    assert_equal(
        parity.run_cstorch(options("CSX", tmp_path, optimizer, reduction, **shape)), plain(optimizer, reduction)
    )


@pytest.mark.cluster
def test_a_batch_that_two_wafers_cannot_share_is_refused(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    with pytest.raises(cstorch.errors.ConfigurationError, match=r"25 rows.*num_csx=2.*multiple of 2"):
        parity.run_cstorch(options("CSX", tmp_path, "sgd", "mean", num_csx=2, batch_size=25))
