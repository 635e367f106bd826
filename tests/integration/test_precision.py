"""Mixed precision through real processes: training goes as in the simulation of its plan, and comes to an end."""

import copy
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import mixed_precision
import pytest
import torch
from cluster_rig import RunningCluster
from xdsl.dialects.builtin import ModuleOp

import cerebras.pytorch as cstorch
from appliance.compiler.pipeline import Half, Precision, Target, compile_module
from cirh.graph import func_of, signature
from cirh.parser import parse_module
from cirh.printer import print_module
from cirh.types import info
from interconnect.segment import Segment
from memoryx.kernels import StateKernel, make_kernels

sys.path.insert(0, str(Path(__file__).parents[1] / "appliance"))
import plan_simulator

STEPS = 40


@pytest.fixture(autouse=True)
def settings_of_its_own() -> Iterator[None]:
    yield
    cstorch.close_backend()
    cstorch.amp.enable_mixed_precision(False)
    cstorch.amp.set_half_dtype("float16")
    cstorch.backends.reset()


def simulated(text: str, model: torch.nn.Module, precision: Precision, num_csx: int) -> list[float]:
    """The losses, by the simulation: all states but the weights begin with zeros."""
    module = parse_module(text)
    arguments = func_of(module).block.args
    states = {s.name: torch.zeros(*info(arguments[s.argument])[:1]) for s in signature(module).states}
    states |= {f"state.model.{name}": p.detach() for name, p in model.named_parameters()}
    plan = compile_module(text, Target(num_csx=num_csx, num_shards=2, precision=precision))
    batches = itertools.islice(itertools.cycle(mixed_precision.input_fn()), STEPS)
    return [
        float(*step.values())
        for step in plan_simulator.Simulation(plan, states).run([list(batch) for batch in batches])
    ]


@pytest.fixture
def generated_updates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The simulation updates by the same generated loops as MemoryX: the last bits of a weight may decide a half."""

    def make(module: ModuleOp, generated: None, states: Segment) -> StateKernel:
        return make_kernels({1: print_module(module)}, states, tmp_path / "generated")[1]

    monkeypatch.setattr(plan_simulator, "StateKernel", make)


@pytest.mark.cluster
@pytest.mark.usefixtures("generated_updates")
@pytest.mark.parametrize(("half", "level", "num_csx"), [("bfloat16", 1, 1), ("bfloat16", 1, 2), ("cbfloat16", 2, 2)])
def test_training_goes_as_in_the_simulation(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, half: str, level: int, num_csx: int
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    torch.manual_seed(0)
    model = mixed_precision.Network()
    initial = copy.deepcopy(model)
    losses = mixed_precision.train(tmp_path, model, half, level, num_csx, STEPS)
    (text,) = (path.read_text() for path in tmp_path.rglob("cirh.mlir"))
    expected = simulated(text, initial, Precision(half=Half(half), level=level), num_csx)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.25 * losses[0]
    assert all(p.dtype is torch.float32 for p in model.parameters())
