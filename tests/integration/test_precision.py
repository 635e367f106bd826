"""Mixed precision through real processes: training goes as in the simulation of its plan, and comes to an end."""

import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import mixed_precision
import pytest
import torch
from cluster_rig import RunningCluster, StartCluster
from torch.utils.data import DataLoader
from xdsl.dialects.builtin import ModuleOp

from appliance.compiler.pipeline import Half, Precision, Target, compile_module
from waferbox.cirh.dialect.operations import func_of
from waferbox.cirh.dialect.types import info
from waferbox.cirh.modules.graph import signature
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module
from waferbox.links.shared_memory import SharedMemory
from waferbox.states.kernels import StateKernel, StateKernels
from wsc.v1 import plan_pb2

sys.path.insert(0, str(Path(__file__).parents[1] / "appliance"))
import plan_simulator
import simulated_roles

STEPS = 40


def simulated(
    text: str,
    model: torch.nn.Module,
    precision: Precision,
    num_csx: int,
    num_steps: int,
    source: Callable[[], DataLoader[Any]] = mixed_precision.input_fn,
    micro_batches: int = 1,
    **others: float,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and last states, by the simulation: all states but the weights and `others` begin with zeros."""
    module = parse_module(text)
    arguments = func_of(module).block.args
    states = {s.name: torch.zeros(*info(arguments[s.argument])[:1]) for s in signature(module).states}
    states |= {f"state.model.{name}": p.detach() for name, p in model.named_parameters()}
    states |= {name: torch.tensor(value) for name, value in others.items()}
    target = Target(num_csx=num_csx, num_shards=2, precision=precision, micro_batches=micro_batches)
    plan = compile_module(text, target)
    batches = itertools.islice(itertools.cycle(source()), num_steps)
    simulation = plan_simulator.Simulation(plan, states)
    losses = [float(*step.values()) for step in simulation.run([list(batch) for batch in batches])]
    return losses, simulation.states


@pytest.fixture
def generated_updates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The simulation updates by the same generated loops as MemoryX: the last bits of a weight may decide a half."""

    def make(module: ModuleOp, generated: None, states: SharedMemory) -> StateKernel:
        return StateKernels().make({1: print_module(module)}, states, tmp_path / "generated")[1]

    monkeypatch.setattr(simulated_roles, "StateKernel", make)


@pytest.mark.cluster
@pytest.mark.usefixtures("generated_updates")
@pytest.mark.parametrize(("half", "level", "num_csx"), [("bfloat16", 1, 1), ("bfloat16", 1, 2), ("cbfloat16", 2, 2)])
def test_training_goes_as_in_the_simulation(
    cluster: RunningCluster,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    half: Literal["bfloat16", "cbfloat16"],
    level: int,
    num_csx: int,
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    torch.manual_seed(0)
    model = mixed_precision.Network()
    initial = copy.deepcopy(model)
    losses, _ = mixed_precision.train(tmp_path, model, half, level, num_csx, STEPS)
    (text,) = (path.read_text() for path in tmp_path.rglob("cirh.mlir"))
    expected, _ = simulated(text, initial, Precision(half=Half(half), level=level), num_csx, STEPS)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.25 * losses[0]
    assert all(p.dtype is torch.float32 for p in model.parameters())


@pytest.mark.cluster
@pytest.mark.usefixtures("generated_updates")
def test_half_gradients_of_several_micro_batches_are_rounded_once(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    torch.manual_seed(0)
    model = mixed_precision.Network()
    initial = copy.deepcopy(model)
    losses, _ = mixed_precision.train(
        tmp_path, model, "bfloat16", 1, 2, STEPS, half_gradients=True, micro_batch_size=16
    )
    (text,) = (path.read_text() for path in tmp_path.rglob("cirh.mlir"))
    precision = Precision(half=Half.BFLOAT16, half_gradients=True)
    expected, states = simulated(text, initial, precision, 2, STEPS, micro_batches=4)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().cpu(), states[f"state.model.{name}"]), name


@pytest.mark.cluster
@pytest.mark.usefixtures("generated_updates")
def test_half_gradients_are_rounded_by_each_node_of_a_tree_that_adds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_cluster: StartCluster
) -> None:
    """Eight wafers below two SwarmX nodes below the root."""
    join = simulated_roles.reduced

    def joined(reduction: "plan_pb2.Reduction.ValueType", tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(tensors) == 8:
            tensors = [join(reduction, tensors[:4]), join(reduction, tensors[4:])]
        return join(reduction, tensors)

    torch.manual_seed(0)
    model = mixed_precision.Network()
    initial, num_steps = copy.deepcopy(model), 6
    with start_cluster(tmp_path / "cluster", wafers=8, memoryx=2, swarmx=3, workers=8) as cluster:
        monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
        losses, _ = mixed_precision.train(
            tmp_path / "artifacts", model, "bfloat16", 1, 8, num_steps, half_gradients=True
        )
        weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    (text,) = (path.read_text() for path in (tmp_path / "artifacts").rglob("cirh.mlir"))
    precision = Precision(half=Half.BFLOAT16, half_gradients=True)
    _, of_one_node = simulated(text, initial, precision, 8, num_steps)
    monkeypatch.setattr(simulated_roles, "reduced", joined)
    expected, states = simulated(text, initial, precision, 8, num_steps)
    assert any(not torch.equal(of_one_node[name], state) for name, state in states.items())
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in weights.items():
        assert torch.equal(weight, states[f"state.model.{name}"]), name


@pytest.mark.cluster
@pytest.mark.usefixtures("generated_updates")
def test_an_input_fn_that_asks_for_the_precision_gives_halves(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the workers as in the script, where the step is compiled for what it gives."""
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    torch.manual_seed(0)
    model = mixed_precision.Network()
    initial, source, num_steps = copy.deepcopy(model), mixed_precision.input_of_the_scripts_type, 12
    losses, _ = mixed_precision.train(tmp_path, model, "bfloat16", 1, 2, num_steps, source=source)
    (text,) = (path.read_text() for path in tmp_path.rglob("cirh.mlir"))
    assert "tensor<128x64xbf16>" in text
    expected, _ = simulated(text, initial, Precision(half=Half.BFLOAT16), 2, num_steps, source)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.cluster
@pytest.mark.usefixtures("generated_updates")
@pytest.mark.parametrize("half_gradients", [False, True])
def test_a_loss_scale_that_overflows_is_halved_until_it_fits(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, half_gradients: bool
) -> None:
    """Gradients in float16, of a loss that is scaled by far too much at first."""
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    torch.manual_seed(0)
    model = mixed_precision.Network()
    initial = copy.deepcopy(model)
    num_steps, scale = 16, 2.0**30
    losses, state = mixed_precision.train(
        tmp_path, model, "float16", 1, 2, num_steps, scale, half_gradients=half_gradients
    )
    (text,) = (path.read_text() for path in tmp_path.rglob("cirh.mlir"))
    others = {"state.grad_scaler.0.loss_scale": scale}
    precision = Precision(half=Half.FLOAT16, half_gradients=half_gradients)
    expected, states = simulated(text, initial, precision, 2, num_steps, mixed_precision.input_fn, 1, **others)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert state == {name: float(states[f"state.grad_scaler.0.{name}"]) for name in state}
    skipped = int(state["num_skipped_steps"])
    assert 0 < skipped < num_steps
    assert state["loss_scale"] == scale / 2**skipped
    assert losses[-1] < losses[skipped]
