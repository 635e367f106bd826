"""What a trainer asks of backends, executors, loaders and schedules around its loops, on the CPU and on a cluster."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cerebras.pytorch.backend import Backend, BackendType, current_backend_impl, get_backend_args
from fake_cluster import FakeCluster
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cerebras.pytorch as cstorch
from cerebras.pytorch.distributed import ClusterConfig
from cerebras.pytorch.utils.data import DataExecutor, DataLoader, RestartableDataLoader, Schedule


class Batches(RestartableDataLoader):
    """Two batches, and how many it has given."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(2):
            self.given += 1
            yield torch.ones(4, 2)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self.given = state_dict["given"]

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"given": sum(state["given"] for state in worker_states)}

    def deaggregate_state_dict(self, aggregated_state_dict: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        return aggregated_state_dict


@pytest.mark.parametrize("kind", [BackendType.CPU, "CPU", "cpu"])
def test_a_backend_by_its_type(kind: BackendType | str, tmp_path: Path) -> None:
    backend = cstorch.backend(kind, artifact_dir=tmp_path / "first", cluster_config=ClusterConfig())
    assert isinstance(backend, Backend)
    assert cstorch.backend() is current_backend_impl() is backend._impl is backend
    assert (backend.is_cpu, backend.is_csx, backend.is_gpu) == (True, False, False)
    assert str(backend.device) == "CPU"
    assert backend.cluster is backend.appliance is backend.cluster_config is None
    backend.artifact_dir = str(tmp_path / "second")
    executor = DataExecutor(DataLoader(Batches), num_steps=1)
    list(executor)
    assert executor.artifact_dir == tmp_path / "second" / "executors" / "000001"


def test_the_device_before_there_is_a_backend() -> None:
    assert cstorch.current_torch_device() == torch.device("cpu")


@pytest.mark.parametrize("kind", [BackendType.CSX, "CSX"])
def test_arguments_of_a_backend_are_its_attributes(cluster: FakeCluster, tmp_path: Path, kind: Any) -> None:
    settings: dict[str, Any] = {"artifact_dir": tmp_path, "compile_dir": "here"}
    settings["cluster_config"] = ClusterConfig(num_csx=2)
    backend = cstorch.backend(kind, **settings)
    for name in get_backend_args(kind):
        assert name == "self" or getattr(backend, name) == settings.get(name, False)


def test_the_cluster_of_a_backend(cluster: FakeCluster, tmp_path: Path) -> None:
    config = ClusterConfig(num_csx=2)
    backend = cstorch.backend("CSX", artifact_dir=tmp_path, cluster_config=config)
    assert backend.cluster.config is backend.cluster_config is config
    assert backend.cluster.workflow_id is backend.cluster.client.workflow_id is None
    assert backend.cluster.start_workflow(lock_resources=False)
    name = backend.cluster.workflow_id
    assert name
    assert name == backend.cluster.client.workflow_id
    assert not backend.cluster.start_workflow()
    backend.cluster.config = ClusterConfig(num_csx=2, num_workers_per_csx=2)
    assert backend.cluster_config.workflow_id == name
    assert backend.target().config.num_workers_per_csx == 2
    assert backend.cluster.client.list_workflow_jobs() == ([], [])
    assert backend.cluster.active_resources() is None
    assert not backend.cluster.check_storage_connectivity()
    backend.cluster.stop_workflow()
    assert backend.cluster.workflow_id is None
    with pytest.raises(TypeError, match="ClusterConfig"):
        backend.cluster.config = {"num_csx": 1}


def test_cluster_configs_are_keys() -> None:
    known = {ClusterConfig(num_csx=2, job_labels=["a=b"]): 1}
    assert ClusterConfig(num_csx=2, job_labels=["a=b"]) in known
    assert ClusterConfig(num_csx=2, job_labels=["a=c"]) not in known


def test_none_means_the_default() -> None:
    names = ("num_csx", "max_wgt_servers", "max_act_per_csx", "num_workers_per_csx", "mount_dirs", "python_paths")
    nothing: dict[str, Any] = dict.fromkeys(names)
    assert ClusterConfig(**nothing) == ClusterConfig()


def test_steps_can_be_asked_for_around_the_loop(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)
    executor = DataExecutor(DataLoader(Batches), num_steps=2)

    def at() -> tuple[int, int, bool, bool]:
        return executor.iteration, executor.user_iteration, executor.is_initial_step, executor.on_final_iteration

    assert at() == (-1, 0, False, False)
    assert [at() for _ in executor] == [(0, 1, True, False), (1, 2, False, True)]
    assert at() == (2, 3, False, True)
    for _ in executor:
        break
    assert at() == (0, 1, True, False)


def test_what_a_loader_tells(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)
    loader = DataLoader(Batches)
    other = copy.copy(loader)
    assert len({loader.id, other.id, DataLoader(Batches).id}) == 3
    assert loader.batch_size is None
    assert isinstance(loader.dataloader, Batches)
    assert loader.dataloader is loader.dataloader is not other.dataloader
    assert [batch.shape for batch in copy.copy(loader)] == [(4, 2), (4, 2)]
    list(DataExecutor(loader, num_steps=3))
    assert loader.batch_size == 4
    assert loader.dataloader.given == 3  # the one that was iterated
    assert other.batch_size is None


@pytest.mark.parametrize("kind", ["CPU", "CSX"])
def test_the_state_of_input_outside_of_loops(cluster: FakeCluster, tmp_path: Path, kind: str) -> None:
    cstorch.backend(kind, artifact_dir=tmp_path)
    loader = DataLoader(Batches)
    assert loader.state_dict() == {"given": 0}
    loader.load_state_dict({"given": 7})
    assert loader.state_dict() == {"given": 7}
    if kind == "CPU":
        list(DataExecutor(loader, num_steps=1))
        assert loader.state_dict() == {"given": 8}


@pytest.mark.parametrize("kind", ["CPU", "CSX"])
def test_a_checkpoint_before_the_first_loop(cluster: FakeCluster, tmp_path: Path, kind: str) -> None:
    backend = cstorch.backend(kind, artifact_dir=tmp_path)
    torch.manual_seed(3)
    with backend.device:
        model = nn.Linear(2, 2)
    compiled = cstorch.compile(model, backend)
    assert model.device == compiled.device == backend.torch_device
    optimizer = cstorch.optim.AdamW(model.parameters())

    @cstorch.checkpoint_closure
    def save(path: Path) -> None:
        cstorch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, str(path))

    save(tmp_path / "initial.mdl")
    loaded = cstorch.load(tmp_path / "initial.mdl")
    assert torch.equal(loaded["model"]["weight"].to("cpu"), model.weight.detach().cpu())
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"].to("cpu"), torch.zeros(2, 2))


def test_a_model_that_knows_its_device_keeps_it(tmp_path: Path) -> None:
    class Telling(nn.Linear):
        @property
        def device(self) -> torch.device:
            return torch.device("meta")

    cstorch.backend("CPU", artifact_dir=tmp_path)
    model = Telling(1, 1)
    cstorch.compile(model)
    assert model.device == torch.device("meta")


def test_a_schedule_is_a_dataclass_whose_ranges_change() -> None:
    interval = Schedule.Range(start=1, end=10, step=3, include_last=True)
    schedule = Schedule([interval])
    assert is_dataclass(Schedule)
    assert asdict(schedule) == {"intervals": [{"start": 1, "end": 10, "step": 3, "include_last": True}]}
    assert (len(interval), list(interval), interval.range()) == (4, [1, 4, 7, 9], range(1, 10, 3))
    other = copy.copy(interval)
    other.start, other.end = 4, 6
    assert (len(other), list(other)) == (2, [4, 5])
    assert interval == Schedule.Range(1, 10, 3, True)


def test_executors_keep_the_schedule_they_were_given(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)
    schedule = Schedule([Schedule.Range(1, 6, 2)])
    executor = DataExecutor(DataLoader(Batches), num_steps=6, checkpoint_steps=schedule)
    schedule.intervals[0].start = 0
    assert executor.checkpoint_steps == [2, 4, 6]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Ranges one behind the other."""
    intervals, at = [], 0
    for _ in range(draw(st.integers(0, 4))):
        start = at + draw(st.integers(0, 5))
        at = start + draw(st.integers(1, 9))
        intervals.append(Schedule.Range(start, at, draw(st.integers(1, 5)), draw(st.booleans())))
    return Schedule(intervals)


@given(schedules(), st.integers(0, 70))
def test_a_schedule_agrees_with_itself(schedule: Schedule, target: int) -> None:
    steps = [step for step in range(70) if schedule.match(step)]
    assert list(schedule) == steps
    assert len(schedule) == len(steps)
    assert [step for interval in schedule.range() for step in interval if step not in steps] == []
    if not steps:
        assert schedule.start is schedule.final_step is schedule.next_immediate_step(target) is None
        return
    assert (schedule.start, schedule.final_step) == (steps[0], steps[-1])
    if target > steps[-1]:
        with pytest.raises(ValueError, match="its last is"):
            schedule.next_immediate_step(target)
    else:
        assert schedule.next_immediate_step(target) == min(step for step in steps if step >= target)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Schedule([Schedule.Range(0, 5), Schedule.Range(4, 9)]), ValueError, "must not overlap"),
        (lambda: Schedule([Schedule.Range(4, 9), Schedule.Range(0, 2)]), ValueError, "stand in order"),
        (
            lambda: Schedule([(0, 5)]),  # type: ignore[list-item]
            TypeError,
            r"made of Schedule\.Range, not tuple",
        ),
        (lambda: Schedule.Range(3, 3), ValueError, "0 <= start < end"),
        (lambda: Schedule.Range(0, 3, 0), ValueError, "at least 1"),
        (lambda: Schedule.Range(0, 9, 4).next_immediate_step(9), ValueError, "its last is 8"),
    ],
)
def test_wrong_schedules(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_where_a_writer_keeps_tensors(tmp_path: Path) -> None:
    writer = cstorch.utils.tensorboard.SummaryWriter(tmp_path)
    writer.add_tensor("weight", torch.ones(2), 3)
    writer.close()
    assert writer.cs_events_dir.parent == tmp_path
    assert [file.parent.name for file in writer.cs_events_dir.rglob("*.pt")] == ["weight"]


@pytest.mark.parametrize(("settings", "rate"), [({}, 0.1), ({"learning_rate": 0.5}, 0.5), ({"learning_rate": {}}, 0.1)])
def test_an_optimizer_without_a_rate(settings: dict[str, Any], rate: float) -> None:
    optimizer = cstorch.optim.configure_optimizer("sgd", [torch.ones(1)], **settings)
    assert optimizer.param_groups[0]["lr"] == rate


def test_rates_by_their_names_of_a_learning_rate() -> None:
    optimizer = cstorch.optim.SGD([torch.ones(1)], lr=1.0)
    schedule = cstorch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 10)
    assert (schedule.initial_learning_rate, schedule.end_learning_rate) == (1.0, 0.5)
    schedule.load_state_dict({"initial_learning_rate": 3.0, "end_learning_rate": 1.0, "last_epoch": 5})
    assert schedule.get_last_lr() == [2.0]
