"""Synthetic data, numbers of steps, nests, and what scripts take from utils and distributed."""

import json
import mmap
import os
import shutil
from collections import UserDict, namedtuple
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader as TorchLoader

from cstorch import distributed
from cstorch.distributed import cluster_resolver, streaming, worker
from cstorch.errors import ConfigurationError, UsageError
from cstorch.utils import nest
from cstorch.utils.benchmark import benchmark_dataloader
from cstorch.utils.data import SyntheticDataset, compute_num_steps
from cstorch.utils.utils import convert_glob_to_regex, get_dir_size, make_param_filter, override_env_vars
from waferbox.input_process.messages import INPUT_VARIABLE, InputSettings, encode

Pair = namedtuple("Pair", ["one", "two"])


def test_synthetic_samples_have_the_form_of_the_specification() -> None:
    spec = {"x": torch.ones(2), "pair": Pair(lambda index: torch.tensor(index), [torch.zeros(1)])}
    loader = TorchLoader(SyntheticDataset(spec, num_samples=5), batch_size=2, drop_last=True)
    batches = list(loader)
    assert len(batches) == len(loader) == 2
    assert batches[1]["x"].equal(torch.ones(2, 2))
    assert batches[1]["pair"].one.tolist() == [2, 3]
    endless = TorchLoader(SyntheticDataset(lambda index: torch.tensor(index)), batch_size=3)
    assert [batch.tolist() for batch in islice(endless, 2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(IndexError, match="no sample 5: there are 5"):
        SyntheticDataset(spec, num_samples=5)[5]
    with pytest.raises(TypeError, match="not int"):
        SyntheticDataset({"x": 3})
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        SyntheticDataset(spec, num_samples=0)
    with pytest.raises(ValueError, match="neither a tensor nor a function"):
        SyntheticDataset([])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 10),
        ({"num_steps": 7}, 7),
        ({"num_epochs": 3}, 30),
        ({"num_epochs": 3, "steps_per_epoch": 4}, 12),
        ({"num_epochs": 3, "grad_accum_steps": 4}, 6),
        ({"max_steps": 25, "initial_step": 5}, 20),
        ({"max_steps": 25, "initial_step": 5, "num_steps": 7}, 7),
        ({"max_steps": 25, "initial_step": 5, "num_epochs": 3}, 20),
    ],
    ids=str,
)
def test_number_of_steps(settings: dict[str, int], expected: int) -> None:
    assert compute_num_steps(range(10), **settings) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 3, "num_epochs": 1}, "num_steps excludes"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"initial_step": -1}, "must not be negative"),
        ({"max_steps": 5, "initial_step": 5}, "no step is left"),
        ({"grad_accum_steps": 11}, "no step is left"),
    ],
)
def test_numbers_of_steps_that_cannot_be(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compute_num_steps(range(10), **settings)


def test_tensors_of_a_nest_and_where_they_are() -> None:
    tensors = [torch.tensor(number) for number in range(4)]
    tree = {"a": [tensors[0], {"b": tensors[1]}], 7: Pair(tensors[2], "text"), "user": UserDict(c=tensors[3])}
    found = {".".join(scope): tensor for scope, tensor in nest.visit_torch_tensors(tree)}
    assert found == {"a.0": tensors[0], "a.1.b": tensors[1], "7.one": tensors[2], "user.c": tensors[3]}
    assert [scope for scope, _ in nest.visit_device_tensors(tree["a"], "cpu", scope=["x"])] == [
        ["x", "0"],
        ["x", "1", "b"],
    ]
    assert list(nest.visit_device_tensors(tree, "meta")) == list(nest.visit_lazy_tensors(tree)) == []
    with pytest.raises(TypeError, match=r"at 7\.two there is a str"):
        list(nest.visit_torch_tensors(tree, strict=True))
    mapped = nest.map_torch_tensors(lambda scope, tensor: (".".join(scope), int(tensor)), {"a": tree["a"], "n": None})
    assert mapped == {"a": [("a.0", 0), {"b": ("a.1.b", 1)}], "n": None}


def test_scopes_of_a_specification() -> None:
    tree = {"a": [1, (2, 3)], "p": Pair(4, {"x": 5})}
    leaves, spec = pytree.tree_flatten(tree)
    scopes = [".".join(scope) for scope in nest.recurse_spec(spec)]
    assert dict(zip(scopes, leaves, strict=True)) == {"a.0": 1, "a.1.0": 2, "a.1.1": 3, "p.one": 4, "p.two.x": 5}


def test_structures_of_users() -> None:
    class Box:
        def __init__(self, content: Any) -> None:
            self.content = content

    @nest.register_visit_fn(Box)
    def visit_box(box: Box) -> Iterator[tuple[list[str], Any]]:
        yield ["content"], box.content

    try:
        assert nest.find_visit_fn(Box(1)) is visit_box
        ((scope, value),) = nest.visit_torch_tensors([Box(torch.tensor(5))])
        assert scope == ["0", "content"]
        assert value == 5
        with pytest.raises(ValueError, match="Box has a visit function"):
            nest.register_visit_fn(Box)(visit_box)
    finally:
        nest.unregister_visit_fn(Box)
    assert nest.find_visit_fn(Box(1)) is None


def test_differences_of_nests() -> None:
    one = {"a": [1, torch.zeros(2)], "b": {}, "c": 2}
    assert list(nest.diff(one, {"a": [1, torch.zeros(2)], "b": {}, "c": 2})) == []
    assert list(nest.diff(one, {"a": [1, torch.ones(2)], "b": [], "d": 3})) == [
        "a.1 differs: tensor([0., 0.]) and tensor([1., 1.])",
        "b differs: {} and []",
        "c is only in the first",
        "d is only in the second",
    ]


def test_small_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert convert_glob_to_regex("fc*.weight").match("fc1.weight")
    assert not convert_glob_to_regex("fc*.weight").match("fc1.weights")
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    chosen = make_param_filter(["fc1.*", "*.bias"])
    assert [name for name in ("fc1.weight", "fc2.weight", "fc2.bias") if chosen(name, weight)] == [
        "fc1.weight",
        "fc2.bias",
    ]
    assert make_param_filter(lambda name, parameter: parameter.ndim > 1)("any", weight)
    for bad in (3, [3], lambda: True):
        with pytest.raises(TypeError, match="filter of parameters"):
            make_param_filter(bad)  # type: ignore[arg-type]
    monkeypatch.setenv("WAFERBOX_TEST_OLD", "1")
    with override_env_vars(WAFERBOX_TEST_OLD="2", WAFERBOX_TEST_NEW="3"):
        assert (os.environ["WAFERBOX_TEST_OLD"], os.environ["WAFERBOX_TEST_NEW"]) == ("2", "3")
    assert os.environ["WAFERBOX_TEST_OLD"] == "1"
    assert "WAFERBOX_TEST_NEW" not in os.environ
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"123")
    (tmp_path / "file").write_bytes(b"45")
    assert get_dir_size(tmp_path) == 5


def test_benchmark_of_a_loader(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = benchmark_dataloader(lambda: [torch.zeros(4)] * 5, num_epochs=2, steps_per_epoch=3)
    assert [(epoch.batches, epoch.samples) for epoch in metrics.epochs] == [(3, 12), (3, 12)]
    assert metrics.samples_per_second > 0
    assert capsys.readouterr().out.count("3 batches") == 2


def be_streamer(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """One of 3 for each of 2 systems."""
    settings = InputSettings(
        worker=rank % 3, num_workers=3, wafer=rank // 3, num_csx=2, half_type="", mixed_precision=False
    )
    monkeypatch.setenv(INPUT_VARIABLE, encode(settings).decode())


def test_who_is_who_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    be_streamer(monkeypatch, 4)
    resolver = distributed.service_resolver()
    assert resolver.cluster_resolver.assumes_role(distributed.TaskRole.WORKER)
    spec = resolver.cluster_spec
    assert (spec.num_csx, spec.num_workers_per_csx, spec.rank, len(spec.tasks)) == (2, 3, 4, 6)
    assert (spec.task().rank, spec.task().local_rank, spec.task().wse_id) == (4, 1, 1)
    assert resolver.streamer_ordinals() == list(range(6))
    assert [distributed.get_streaming_batch_size(9), distributed.get_streaming_batch_size(9, global_rank=2)] == [4, 5]
    with pytest.raises(ValueError, match="no streamer 6"):
        distributed.get_streaming_batch_size(9, global_rank=6)


class AsksInProcess(torch.utils.data.IterableDataset[Any]):
    """Asks where it is when it is iterated, which is in a process of the torch DataLoader."""

    def __iter__(self) -> Iterator[int]:
        yield distributed.get_streaming_rank()


@pytest.mark.parametrize(
    ("ask", "share", "rank"),
    [
        (distributed.is_streamer, False, False),
        (distributed.is_master_ordinal, False, False),
        (distributed.get_ordinal, False, False),
        (lambda: (distributed.get_ordinal(), distributed.num_tasks()), True, True),
        (lambda: (distributed.get_rank(), distributed.get_world_size()), True, True),
        (distributed.get_streaming_rank, True, True),
        (distributed.num_streamers, True, False),
        (lambda: distributed.get_streaming_batch_size(8), True, False),
        (lambda: list(TorchLoader(AsksInProcess(), num_workers=2)), True, True),
    ],
)
def test_what_an_input_fn_asks_says_whether_it_shards(
    monkeypatch: pytest.MonkeyPatch, ask: Any, share: bool, rank: bool
) -> None:
    monkeypatch.setattr(streaming, "_asked", mmap.mmap(-1, 3))
    ask()
    assert (streaming.share_was_asked(), streaming.rank_was_asked()) == (share, rank)


def test_who_is_who_on_the_client() -> None:
    resolver = distributed.service_resolver()
    assert resolver.cluster_resolver.assumes_role(distributed.TaskRole.MASTER)
    assert (resolver.cluster_resolver.num_tasks, resolver.streamer_ordinals(), resolver.receiver_ordinals()) == (
        1,
        [],
        [0],
    )
    task = resolver.cluster_spec.task()
    assert (task.rank, task.local_rank, task.wse_id) == (0, 0, 0)
    assert cluster_resolver.TaskSpec(rank=1, local_rank=1, wse_id=0, node_name="n").node_name == "n"
    assert distributed.get_streaming_batch_size(9) == 9


def test_state_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="inside the state_dict"):
        distributed.get_worker_state()
    told = {"local_worker_id": 1, "num_workers_per_csx": 3, "num_csx": 2, "wse_id": 1}
    counts = {"appliance_step": 9, "worker_step": 3, "samples_streamed": 24}
    monkeypatch.setenv("WAFERBOX_WORKER_STATE", json.dumps({**told, **counts}))
    state = distributed.get_worker_state()
    assert (state.global_worker_id, state.total_num_workers, state.samples_streamed) == (4, 6, 24)


def test_limit_of_the_worker_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "WORKER_CACHE_ROOT", str(tmp_path / "cache"))
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1000, 700, 300))
    (tmp_path / "data").write_bytes(bytes(10))
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(bytes(120))
    destination = tmp_path / "cache" / "copy"
    assert worker.hit_worker_cache_limit(str(source), str(destination)) == (True, 120, 100)
    destination.mkdir(parents=True)
    (destination / "old").write_bytes(bytes(50))
    assert worker.hit_worker_cache_limit(str(source), str(destination)) == (False, 120, 150)
    with pytest.raises(ValueError, match="not below the worker cache"):
        worker.hit_worker_cache_limit(str(source), str(tmp_path / "elsewhere"))
