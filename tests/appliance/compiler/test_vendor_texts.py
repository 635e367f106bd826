"""Steps as the vendor's own client wrote them, in float16: they come back as text, and train as plain torch does.

The texts are records of that client, with their locations cut to the line of the script.
"""

from pathlib import Path

import pytest
import torch
from plan_simulator import Simulation
from torch import nn
from torch.nn import functional as F
from vendor_networks import NETWORKS, PARTS, Part

from appliance.compiler.passes.vendor.random_keys import COUNTER
from appliance.compiler.pipeline import Target, compile_module
from appliance.compiler.plan_check.check import check_plan
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import func_of
from waferbox.cirh.modules.graph import signature
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module

pytestmark = pytest.mark.parity

TEXTS = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[2] / "shared/vendor_texts").iterdir())}
# What optimizers begin with, where it is not zero.
STARTS = {"beta1_power": 0.9, "beta2_power": 0.999}
BOTH = pytest.mark.parametrize("wafers", [1, 2])


def initial_states(text: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    module = parse_module(text)
    arguments = func_of(module).block.args
    states = {COUNTER: torch.tensor(0)} if "RandomUniform" in text else {}
    for state in signature(module).states:
        shape, dtype = types.info(arguments[state.argument])
        start = torch.full(shape, STARTS.get(state.name.rpartition(".")[2], 0), dtype=dtype)
        states[state.name] = weights.get(state.name, start).to(dtype)
    return states


def simulation(name: str, wafers: int, weights: dict[str, torch.Tensor]) -> Simulation:
    plan = compile_module(TEXTS[name], Target(num_csx=wafers, num_shards=1))
    check_plan(plan)
    return Simulation(plan, initial_states(TEXTS[name], weights))


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"state.model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_come_back_the_same(name: str) -> None:
    module = parse_module(TEXTS[name])
    verify(module)
    again = parse_module(print_module(module))
    assert module.is_structurally_equivalent(again)
    assert all(a.location == b.location for a, b in zip(module.walk(), again.walk(), strict=True))


@BOTH
@pytest.mark.parametrize("name", PARTS)
def test_an_operation_and_its_gradient_are_those_of_torch(name: str, wafers: int) -> None:
    torch.manual_seed(3)
    model, x = Part(PARTS[name]), torch.randn(16, 8)
    before = weights_of(model)
    model(x).mean().backward()
    steps = simulation(name, wafers, before)
    steps.run([[x]])
    for parameter, tensor in model.named_parameters():
        change = steps.states[f"state.model.{parameter}"] - before[f"state.model.{parameter}"]
        assert tensor.grad is not None
        expected = -0.1 * tensor.grad
        torch.testing.assert_close(change, expected, rtol=0, atol=2e-3 * float(expected.abs().max()))


@BOTH
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_as_in_torch(name: str, wafers: int) -> None:
    torch.manual_seed(3)
    make, optimizer_of = NETWORKS[name]
    model = make()
    optimizer = optimizer_of(model.parameters())
    if name == "gpt":
        batches = [[torch.randint(0, 32, (4, 8)), torch.randint(0, 32, (4, 8))] for _ in range(4)]
    else:
        batches = [[torch.randn(16, 1, 8, 8), torch.randint(0, 4, (16,))] for _ in range(4)]
    steps = simulation(name, wafers, weights_of(model))
    outputs = steps.run([[x if x.is_floating_point() else x.int(), y.int()] for x, y in batches])
    for (x, y), made in zip(batches, outputs, strict=True):
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(made["output_loss"], loss.detach(), rtol=2e-3, atol=0)
    running = {f"state.model.{key}": value for key, value in model.named_buffers() if "running" in key}
    for key, value in running.items():
        # They began at 0 and 1, and have moved by 0.3 or so; with AdamW, weights follow the signs of small gradients.
        torch.testing.assert_close(steps.states[key], value, rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["mlp_dropout", "opt_muon"])
def test_steps_with_dropout_and_with_notes_are_the_same_on_two_wafers(name: str) -> None:
    torch.manual_seed(3)
    shapes = {"fc1.weight": (16, 8), "fc1.bias": (16,), "fc2.weight": (4, 16), "fc2.bias": (4,)}
    weights = {f"state.model.{name}": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    batches = [[torch.randn(16, 8), torch.randint(0, 4, (16,)).int()] for _ in range(3)]
    one, two = (
        [values["output_loss"] for values in simulation(name, wafers, weights).run(batches)] for wafers in (1, 2)
    )
    torch.testing.assert_close(one, two, rtol=1e-3, atol=0)
    assert len({float(loss) for loss in one}) == 3
