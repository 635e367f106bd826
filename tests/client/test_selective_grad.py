"""cstorch.nn.SelectiveGrad: chosen elements are trained, the others stay."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cstorch


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def positive(parameter: torch.Tensor) -> torch.Tensor:
    return parameter > 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        features = torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model(features), features[:, :2]).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "settings"),
    [("SGD", {"momentum": 0.9, "weight_decay": 0.1}), ("AdamW", {"weight_decay": 0.1}), ("Lamb", {})],
)
def test_what_is_not_chosen_stays_and_does_not_count(name: str, settings: dict[str, Any]) -> None:
    model = network()
    before = copy.deepcopy(model)
    model.apply(cstorch.nn.SelectiveGrad("*.weight", positive))
    optimizer = getattr(cstorch.optim, name)(model.parameters(), lr=0.1, **settings)
    train(model, optimizer)
    for path in ("0.weight", "2.weight"):
        weight, first = model.get_parameter(path), before.get_parameter(path)
        mask = model.get_buffer(f"{path}_requires_grad")
        assert torch.equal(mask, first > 0)
        assert torch.equal(weight[~mask], first[~mask])
        assert not torch.isclose(weight[mask], first[mask]).any()
        assert weight.grad is not None
        assert not weight.grad[~mask].any()
        for value in optimizer.state[weight].values():
            assert value.shape != weight.shape or not value[~mask].any()
    assert not torch.isclose(model.get_parameter("0.bias"), before.get_parameter("0.bias")).any()


def test_all_chosen_is_as_without() -> None:
    chosen, plain = network(), network()
    chosen.apply(cstorch.nn.SelectiveGrad(["0.*", "2.*"], lambda parameter: parameter == parameter))
    for model in (chosen, plain):
        train(model, cstorch.optim.AdamW(model.parameters(), lr=0.1))
    for mine, theirs in zip(chosen.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_outliers_are_chosen_by_default() -> None:
    model = nn.Linear(2, 100, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 200).reshape(100, 2))
        model.weight[7, 1] = 9.0
        model.weight[8, 0] = -5.0
    selective = cstorch.nn.SelectiveGrad(lambda name, parameter: name == "weight" and parameter.dim() == 2)
    model.apply(selective)
    mask = model.get_buffer("weight_requires_grad").clone()
    assert mask[7, 1]
    assert mask[8, 0]
    assert mask.sum() < 100
    model.apply(selective)  # once is enough
    assert torch.equal(model.get_buffer("weight_requires_grad"), mask)
    assert "weight_requires_grad" in model.state_dict()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="outlier"):
        cstorch.nn.SelectiveGrad("*", "inlier")
    with pytest.raises(TypeError, match="glob"):
        cstorch.nn.SelectiveGrad(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not to Tensor"):
        cstorch.nn.SelectiveGrad("*").apply(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a bool mask"):
        network().apply(cstorch.nn.SelectiveGrad("*", torch.abs))
