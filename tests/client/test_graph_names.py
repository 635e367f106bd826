"""Constants, arrays, names, annotations and decompositions: what scripts take from the top of the package."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traced_steps import outputs_of, states_of, trace

import cstorch
from cstorch._internal.tracing import DEVICE, move_module, trace_step
from cstorch.core.annotation import AnnotationMode, create_annotation
from cstorch.decomp.registry import remove_decomposition
from cstorch.errors import ConfigurationError

X = torch.randn(4, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16, torch.int64, torch.bool, torch.bfloat16])
def test_arrays_and_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0, -2.0], [3.0, 0.5, 100.0]]).to(dtype)
    again = cstorch.from_numpy(cstorch.to_numpy(tensor))
    assert again.dtype is dtype
    assert torch.equal(again, tensor)


def test_bfloat16_is_its_bits_in_numpy() -> None:
    array = cstorch.to_numpy(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert array.dtype.itemsize == 2
    assert array.tolist() == [0x3F80, -0x4000]
    assert cstorch.from_numpy(np.array([0x3F80], dtype=np.int16)).dtype is torch.int16  # without the mark it is no half


def test_a_device_tensor_becomes_an_array(tmp_path: Path) -> None:
    backend = cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    with backend.device:
        tensor = torch.arange(3.0)
    assert cstorch.to_numpy(tensor).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("size", [3, 3000])
def test_a_constant_is_part_of_the_step(tmp_path: Path, size: int) -> None:
    constant = torch.randn(size)
    assert cstorch.make_constant(constant) is constant  # without a backend, and on the CPU
    cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    x = torch.randn(2, size)
    traced = trace(lambda batch: batch * cstorch.make_constant(constant), x)
    assert (len(traced.states), len(traced.outputs)) == (int(size > 1024), 1)
    states = [info.cell.data() for info in traced.states]
    assert all(torch.equal(state, constant) for state in states)
    assert cstorch.make_constant(constant).device == DEVICE


def modules_of(step: Any, model: nn.Module) -> set[str]:
    move_module(model)
    names = {child: name for name, child in model.named_modules()}
    traced = trace_step(step, X, states_of(model=model), names, outputs_of)
    return {node.meta["source"].module for node in traced.graph.nodes if "source" in node.meta}


def test_a_scope_names_a_part_of_the_module_that_runs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with cstorch.name_scope("part") as name:
                assert name == "part"
                x = torch.exp(x)
            return self.inner(x)

    model = Model()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        with cstorch.name_scope("norm"):
            return y.square().sum()

    found = modules_of(step, model)
    assert {"inner", "norm"} < found
    assert any(name.endswith("part") for name in found)


def test_a_scope_outside_a_step_does_nothing() -> None:
    with cstorch.name_scope("part", raw=True):
        assert torch.ones(1).item() == 1.0
    cstorch.set_debug_scope("part")
    with pytest.raises(TypeError, match="named by a str"):
        cstorch.set_debug_scope(3)  # type: ignore[arg-type]


def test_modules_have_names() -> None:
    activation = nn.ReLU()
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(activation))
    assert cstorch.get_debug_name(model) == "Sequential"
    cstorch.add_debug_name(model)
    assert cstorch.get_debug_name(activation) == "Sequential.1.0"
    cstorch.add_debug_name(model, "root")
    assert [cstorch.get_debug_name(module) for module in model.modules()] == ["root", "root.0", "root.1", "root.1.0"]


def test_levels_nest_and_change_no_result() -> None:
    layer = nn.Linear(3, 2)
    seen: list[int] = []

    @cstorch.pol(level=2)
    def outer(x: torch.Tensor) -> torch.Tensor:
        seen.append(cstorch.current_pol())
        return cstorch.pol(bwd_level=0)(inner)(x)

    @cstorch.pol(level=0)
    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(cstorch.current_pol())
        return cstorch.pol(bwd_level=0)(layer)(x)

    assert torch.equal(outer(X), layer(X))
    assert (seen, cstorch.current_pol()) == ([2, 0], 1)
    with pytest.raises(ConfigurationError, match="must be 0, 1 or 2"):
        cstorch.pol(3)


def test_annotations_are_checked_and_change_nothing() -> None:
    class Config(AnnotationMode.Config):
        pass

    def attribute(config: Any, is_backward: bool) -> AnnotationMode.Attribute:
        return AnnotationMode.Attribute("mine", is_backward)

    assert create_annotation(Config, attribute, enable_fwd=True, enable_bwd=False)(F.relu) is F.relu
    with pytest.raises(TypeError):
        create_annotation(Config, attribute, colour="red")

    @cstorch.device_annotation("wafer", enable_bwd=False)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert torch.equal(double(X), X * 2)
    with pytest.raises(ConfigurationError, match="one of wgth, acth, wafer"), cstorch.device_annotation("gpu"):  # type: ignore[arg-type]
        raise AssertionError


def test_a_decomposition_is_traced_in_the_place_of_its_operation() -> None:
    @cstorch.register_decomposition(torch.ops.aten.softplus.default)
    def softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
        return torch.log1p(torch.exp(x * beta)) / beta

    @cstorch.register_decomposition(torch.ops.aten.exp.default)
    def exp(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) * 1  # itself, and more

    try:
        targets = [str(node.target) for node in trace(F.softplus, X).graph.nodes if node.op == "call_function"]
    finally:
        remove_decomposition(torch.ops.aten.softplus)
        remove_decomposition(torch.ops.aten.exp)
    assert targets == [
        "aten.mul.Tensor",
        "aten.exp.default",
        "aten.mul.Tensor",
        "aten.log1p.default",
        "aten.div.Tensor",
    ]
    assert "aten.softplus.default" in [str(node.target) for node in trace(F.softplus, X).graph.nodes]
    with pytest.raises(ConfigurationError, match="never reaches a traced step"):
        cstorch.register_decomposition(torch.ops.aten.linear)(F.linear)
    with pytest.raises(ConfigurationError, match="for traced steps"):
        cstorch.register_decomposition(torch.ops.aten.exp, device="CPU")
