"""Optimizers, schedules and sparsity as releases 1.6 to 2.2 configure them."""

import pytest
import torch
from torch import nn

import cerebras_pytorch as cstorch
from cerebras_pytorch.optim import lr_scheduler as older
from cstorch.optim import lr_scheduler


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_parameters_are_grouped_by_decay_and_by_the_scale_of_the_rate() -> None:
    model = Block()
    groups = cstorch.optim.configure_param_groups(
        model, {"weight_decay": 0.1, "adjust_learning_rate": {"embedding": 0.5}}
    )
    found = {
        (group["weight_decay"], group["adjust_learning_rate"]): [
            name for name, parameter in model.named_parameters() if any(parameter is each for each in group["params"])
        ]
        for group in groups
    }
    assert found == {
        (0.1, 0.5): ["embedding.weight"],
        (0.1, 1.0): ["layer.weight"],
        (0.0, 1.0): ["layer.bias", "norm.weight", "norm.bias"],
    }
    optimizer = cstorch.optim.configure_optimizer("AdamW", groups, lr=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]


def test_the_rate_of_a_kind_of_layer_is_scaled() -> None:
    model = nn.ModuleDict(
        {"embedding_layer": nn.Embedding(4, 4), "linear_layer": nn.Linear(4, 4), "head": nn.Linear(4, 2)}
    )
    groups = cstorch.optim.configure_param_groups(
        model, {"adjust_learning_rate": {"decoder_kernel": 0.1, "embedding": 0.5}}
    )
    found = {group["adjust_learning_rate"]: [tuple(each.shape) for each in group["params"]] for group in groups}
    assert found == {0.5: [(4, 4)], 0.1: [(4, 4)], 1.0: [(4,), (2, 4), (2,)]}


def test_groups_without_settings() -> None:
    (group,) = cstorch.optim.configure_param_groups(Block(), {"optimizer_type": "SGD"})
    assert group["weight_decay"] == 0.0
    assert "adjust_learning_rate" not in group
    with pytest.raises(ValueError, match="no parameter's name"):
        cstorch.optim.configure_param_groups(Block(), {"adjust_learning_rate": {"decoder": 2.0}})


def test_configurations_are_checked() -> None:
    kind, settings = cstorch.optim.configure_optimizer_params(
        optimizer_type="adamw", kwargs={"learning_rate": 0.1, "optim_params": {"betas": (0.9, 0.99)}}
    )
    assert kind is cstorch.optim.AdamW
    assert settings == {"betas": (0.9, 0.99)}
    schedule, settings = cstorch.optim.configure_scheduler_params({"scheduler": "linear", "total_iters": 3})
    assert schedule is lr_scheduler.LinearLR
    assert settings == {"total_iters": 3}
    with pytest.raises(ValueError, match="no optimizer"):
        cstorch.optim.configure_optimizer_params("none", {})
    with pytest.raises(ValueError, match="no learning rate schedule"):
        cstorch.optim.configure_scheduler_params({"scheduler": "none"})
    with pytest.raises(ValueError, match="the key 'scheduler'"):
        cstorch.optim.configure_scheduler_params({})


@pytest.mark.parametrize(
    ("old", "old_arguments", "new", "arguments"),
    [
        ("Constant", (0.1, 5), "ConstantLR", (0.1,)),
        ("Polynomial", (0.1, 0.01, 5, 2.0, False), "PolynomialLR", (0.1, 0.01, 5, 2.0)),
        ("Exponential", (0.1, 5, 0.5, True), "ExponentialLR", (0.1, 5, 0.5, True)),
        ("InverseExponentialTimeDecay", (0.1, 1, 5, 0.5, False), "InverseExponentialTimeDecayLR", (0.1, 1, 5, 0.5)),
        ("InverseSquareRootDecay", (0.1, 2.0, 2), "InverseSquareRootDecayLR", (0.1, 2.0, 2)),
        ("CosineDecay", (0.1, 0.01, 5), "CosineDecayLR", (0.1, 0.01, 5)),
        ("CosineAnnealing", (0.1, 5, 0.01), "CosineAnnealingLR", (0.1, 5, 0.01)),
        ("CosineAnnealingWarmRestarts", (0.1, 3, 1, 0.0), "CosineAnnealingWarmRestarts", (0.1, 3, 1, 0.0)),
        ("MultiStep", (0.1, 0.5, [1, 3]), "MultiStepLR", (0.1, 0.5, [1, 3])),
        ("Step", (0.1, 0.5, 2), "StepLR", (0.1, 2, 0.5)),
        ("Multiplicative", (0.1, 0.5), "MultiplicativeLR", (0.1, 0.5)),
    ],
)
def test_older_schedules_are_the_newer_ones(
    old: str, old_arguments: tuple[object, ...], new: str, arguments: tuple[object, ...]
) -> None:
    rates = []
    for kind, given in ((getattr(older, old), (*old_arguments, True)), (getattr(lr_scheduler, new), arguments)):
        optimizer = cstorch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        schedule = kind(optimizer, *given)
        assert isinstance(schedule, getattr(lr_scheduler, new))
        seen = []
        for _ in range(6):
            seen.append(float(schedule.get_last_lr()[0]))
            optimizer.step()
            schedule.step()
        rates.append(seen)
    assert rates[0] == rates[1]


def test_names_of_schedules_mean_the_newer_ones() -> None:
    optimizer = cstorch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = cstorch.optim.configure_lr_scheduler(optimizer, {"scheduler": "Constant", "learning_rate": 0.5})
    assert type(schedule) is lr_scheduler.ConstantLR


def test_sparsity_is_configured_by_patterns_of_names() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sparsity = cstorch.sparse.configure_sparsity_optimizer(
        "static", model.named_parameters(), sparsity=0.5, init_method="random", param_name_patterns=[r"^0\.weight"]
    )
    sparsity.hook_module(model)
    sparsity.initialize_sparsity()
    plain = cstorch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = cstorch.sparse.SparsityWrapperOptimizer(plain, sparsity)
    assert optimizer is plain
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    first, second = (layer.get_parameter("weight") for layer in model)
    assert int((first == 0).sum()) == 32
    assert int((second == 0).sum()) == 0
    sparsity.load_state_dict(sparsity.state_dict())
