"""What scripts of releases 1.2 to 1.7 ask of cb_model, cbtorch.state and their optimizers."""

import logging
from pathlib import Path
from typing import Any

import cerebras.framework.torch.core.cb_model as cm
import pytest
import torch
from cerebras.framework.torch.core import modes
from fake_cluster import FakeCluster, StartCluster, State
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.framework.torch as cbtorch
import cstorch
from cstorch.errors import ConfigurationError, StateError, UsageError
from wsc.v1 import plan_pb2


def halve(state: State, step: int) -> dict[str, torch.Tensor]:
    state["state.model.weight"].mul_(0.5)
    return {name: torch.tensor(float(step)) for name in ("output_loss", "output_values_0")}


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    return start_cluster(halve)


class Script:
    """Trains a layer, as the scripts do: all that is reported and saved is in step closures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        layer = nn.Linear(2, 1)
        nn.init.ones_(layer.weight)
        self.model = cbtorch.module(layer)
        self.optimizer = cbtorch.optimizer(cbtorch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        self.loader = cbtorch.dataloader(DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=4))
        self.losses: list[float] = []
        self.refused: list[int] = []

    @property
    def saved(self) -> dict[int, float]:
        return {int(file.stem): float(torch.load(file)["weight"][0, 0]) for file in self.folder.glob("*.mdl")}

    @cm.step_closure  # type: ignore[untyped-decorator]  # the names of this release have no types
    def report(self, loss: torch.Tensor) -> None:
        self.losses.append(cm.mesh_reduce("loss", loss.item(), lambda values: sum(values) / len(values)))

    @cm.step_closure  # type: ignore[untyped-decorator]  # the names of this release have no types
    def save(self, step: int) -> None:
        try:
            cm.save(self.model.state_dict(), self.folder / f"{step}.mdl", master_only=True)
        except StateError:
            self.refused.append(step)

    def train(self, epochs: int) -> None:
        with cbtorch.Session(self.loader, mode=modes.TRAIN):
            for _ in range(epochs):
                for batch in self.loader:
                    self.optimizer.zero_grad()
                    loss = self.model(batch[0]).mean()
                    loss.backward()
                    self.optimizer.step()
                    self.report(loss)
                    self.save(cm.get_run_step())


def test_a_run_has_so_many_steps_checkpoints_and_values(cluster: FakeCluster, tmp_path: Path) -> None:
    cbtorch.initialize(cs_ip=cluster.address, service_workdir=tmp_path / "work")
    script = Script(tmp_path)
    cm.set_run_config(6, 2, 1)
    script.train(epochs=9)
    assert cm.get_run_step() == 6
    assert [(begun.num_steps, list(begun.checkpoint_steps)) for begun in cluster.begun] == [(4, [2, 4]), (2, [2])]
    assert script.saved == {2: 0.25, 4: 0.0625, 6: 0.5**6}
    assert script.refused == [1, 3, 5]
    assert script.losses == [1, 2, 3, 4, 1, 2]
    tracker = cbtorch.state().rate_tracker
    assert tracker is not None
    assert tracker.total_count == 8


@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        ({}, "PIPELINE"),
        ({"appliance": True}, "WEIGHT_STREAMING"),
        ({"num_csx": 2}, "WEIGHT_STREAMING"),
    ],
)
def test_weights_are_on_the_wafer_unless_there_is_an_appliance(
    cluster: FakeCluster, tmp_path: Path, settings: dict[str, Any], strategy: str
) -> None:
    cbtorch.initialize(cs_ip=cluster.address, service_workdir=tmp_path / "work", **settings)
    script = Script(tmp_path)
    cm.set_run_config(1, 1, 1)
    script.train(epochs=1)
    assert cluster.created[-1].execution_strategy == plan_pb2.ExecutionStrategy.Value(f"EXECUTION_STRATEGY_{strategy}")


def test_a_run_on_the_cpu(tmp_path: Path) -> None:
    cbtorch.initialize(service_workdir=tmp_path)
    script = Script(tmp_path)
    cm.set_run_config(6, checkpoint_steps=4, fetch_steps=2)
    script.train(epochs=2)
    assert len(script.losses) == 3  # steps 2 and 4 of the first pass, 2 of the second


def test_the_last_step_counts_though_the_script_leaves_its_loop(cluster: FakeCluster, tmp_path: Path) -> None:
    cbtorch.initialize(cs_ip=cluster.address, service_workdir=tmp_path)
    script = Script(tmp_path)
    cm.set_run_config(2)
    with cbtorch.Session(script.loader) as session:
        for batch in script.loader:
            cbtorch.state().track_object({"mean": script.model(batch[0]).mean()})
            assert cbtorch.state().is_inside_execution_loop
            session.mark_step()
            if cm.get_run_step() == 2:
                break
    assert cluster.steps_run == 2
    assert [name for name, _, _ in cluster.compiled[0]["outputs"]] == ["output_values_0"]
    assert script.model.weight.cpu()[0, 0] == 0.25  # not left early: the state is there


def test_compile_only(cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.address)
    cbtorch.initialize(compile_only=True, validate_only=False, appliance=True, service_workdir=tmp_path / "work")
    assert cm.use_cs()
    assert cm.is_wse_device()
    assert cm.is_appliance()
    with pytest.raises(UsageError, match="no step"):
        cbtorch.compile(fabric_config_file=None, validate_only=False)
    cstorch.close_backend()

    cbtorch.initialize(validate_only=True, service_workdir=tmp_path / "work")
    script = Script(tmp_path)
    with pytest.warns(UserWarning, match="validate_only"):
        script.train(epochs=1)
    assert cbtorch.compile(fabric_config_file="file", validate_only=True)
    cstorch.close_backend()

    cbtorch.initialize(service_workdir=tmp_path)
    with pytest.raises(UsageError, match="for the CPU"):
        cbtorch.compile()


def test_state_and_environment(tmp_path: Path) -> None:
    cbtorch.initialize(service_workdir=tmp_path, use_cbfloat16=False)
    assert cbtorch.env().service_workdir == str(tmp_path)
    assert cbtorch.env().weight_streaming_mode
    state = cbtorch.state()
    model = cbtorch.module(nn.Linear(2, 1))
    accuracy = cbtorch.metrics.AccuracyMetric("accuracy")
    assert (state.modules, state.metrics, state.mixed_precision) == ([model.module], [accuracy], False)
    assert (state.rate_tracker, state.is_inside_execution_loop) == (None, False)
    with state.init_tracker.entry("configure_optimizer"):
        pass
    state.full_config.matching.kernel.inc_pwt_estimate = True
    assert state.full_config.matching.kernel.inc_pwt_estimate is True
    state.track_object(torch.ones(1))


def test_an_optimizer_has_the_methods_of_its_time(tmp_path: Path) -> None:
    cbtorch.initialize(service_workdir=tmp_path)
    parameters = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    optimizers: list[Any] = [cbtorch.optimizer(cbtorch.optim.SGD([p], lr=0.1, momentum=0.9)) for p in parameters]
    one, other = optimizers
    schedule = cbtorch.optim.lr_scheduler.LinearLR(one, 0.1, 0.01, 10)
    one.set_main_lr_scheduler(schedule)
    one.set_main_lr_scheduler(None)
    with pytest.raises(UsageError, match="made for this optimizer"):
        other.set_main_lr_scheduler(schedule)
    state_dict = one.state_dict()
    assert one.convert_state_dict_for_checkpoint(state_dict) is state_dict


def test_questions_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    cbtorch.initialize(service_workdir=tmp_path)
    assert cm.rendezvous("here", payload="mine") == ["mine"]
    assert (cm.is_wse_device(), cm.is_appliance(), cm.is_sync_mode()) == (False, False, False)
    assert cm.metrics_counter_value("samples") is None
    constant = torch.ones(2)
    assert cm.make_constant(constant) is constant
    with pytest.raises(TypeError, match="takes a tensor"):
        cm.make_constant([1.0])
    cm.set_target_num_replicas(2)
    assert cstorch.backends.csx.performance.num_replicas == 2
    with pytest.raises(ConfigurationError, match="at least 1"):
        cm.set_target_num_replicas(0)
    for wrong in ((0, 1, 1), (1, -1, 1), (1, 1, -1)):
        with pytest.raises(ConfigurationError, match="set_run_config"):
            cm.set_run_config(*wrong)
    cm.set_state_names({})
    cm.set_attribute(constant, "name", 1)
    cm.run_step_closures()
    cm.master_print("a", 1)
    assert capsys.readouterr().out == "a 1\n"
    with caplog.at_level(logging.INFO, logger="cstorch.progress"):
        cm.print_metrics_report()
        cm.print_update(cm.device(), 5, 0.25, modes.TRAIN)
    (line,) = caplog.messages
    assert line.startswith("| Train Device=CPU, Step=5, Loss=0.25000, Rate=")
    assert modes.is_valid("eval")
    assert not modes.is_valid("predict")


def test_save_is_torch_save_of_cpu_tensors(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    cm.save({"a": torch.ones(2)}, file, post_transfer_callback=lambda state: {**state, "more": 1})
    loaded = torch.load(file)
    assert loaded["a"].tolist() == [1, 1]
    assert loaded["more"] == 1


def test_what_the_old_core_had_beside_is_there_and_raises_when_it_is_called() -> None:
    with pytest.raises(UsageError, match="drives the real client's inside"):
        cbtorch.core.appliance.ApplianceMode()
