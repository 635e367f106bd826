"""A reference of sparse training, written out, for comparison with the algorithms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

LR, MOMENTUM = 0.1, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCase:
    """A configuration, and its reference: sparsity at a step, fraction dropped at a step, steps that update."""

    config: dict[str, Any]
    sparsity: Callable[[int], float]
    dropped: Callable[[int], float] = lambda step: 0.0
    updates: Sequence[int] = ()
    groups: tuple[int, int] = field(default=(0, 1))  # dimension, number

    def __str__(self) -> str:
        return f"{self.config['algorithm']}-{self.config['init_method']}"


CASES = [
    SparseCase(config={"algorithm": "static", "sparsity": 0.6, "init_method": "topk"}, sparsity=lambda step: 0.6),
    SparseCase(
        config={
            "algorithm": "gmp",
            "sparsity": {"type": "linear", "init": 0.2, "slope": 0.06},
            "update": {"freq": 2, "start": 1, "stop": 8},
            "init_method": "topk",
        },
        sparsity=lambda step: 0.2 + 0.06 * step,
        updates=(1, 3, 5, 7),
    ),
    SparseCase(
        config={
            "algorithm": "set",
            "sparsity": 0.5,
            "drop_fraction": {"type": "power", "init": 0.5, "beta": 0.9},
            "update": {"steps": [2, 3, 7]},
            "init_method": "checkerboard",
        },
        sparsity=lambda step: 0.5,
        dropped=lambda step: 0.5 * 0.9**step,
        updates=(2, 3, 7),
    ),
    SparseCase(
        config={
            "algorithm": "rigl",
            "sparsity": 0.7,
            "drop_fraction": [0.3, 0.5],
            "update": {"freq": 3},
            "init_method": "random",
        },
        sparsity=lambda step: 0.7,
        dropped=lambda step: [0.3, 0.5][step // 3 % 2],
        updates=(0, 3, 6, 9),
    ),
    SparseCase(
        config={
            "algorithm": "rigl",
            "sparsity": 0.5,
            "drop_fraction": 0.4,
            "balance_in_groups": 2,
            "init_method": "topk",
        },
        sparsity=lambda step: 0.5,
        dropped=lambda step: 0.4,
        updates=range(10),
        groups=(1, 2),
    ),
]


def network() -> nn.Module:
    """Returns a network with two matrices that become sparse, and parameters that do not."""
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))


def batches(count: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(12, 6, dtype=dtype), torch.randint(4, (12,))) for _ in range(count)]


def losses_by_hand(
    case: SparseCase,
    model: nn.Module,
    masks: dict[str, torch.Tensor],
    data: Sequence[Any],
    next_step: Callable[[], Any],
) -> list[torch.Tensor]:
    """Trains `model` and changes the masks, which are by name of a weight, in place. Returns the losses."""
    momenta = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    losses = []
    for step, (features, labels) in enumerate(data):
        loss = F.cross_entropy(model(features), labels)
        gradients = dict(zip(momenta, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        losses.append(loss.detach())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                gradient = gradients[name] * masks[name] if name in masks else gradients[name]
                momenta[name] = MOMENTUM * momenta[name] + gradient
                parameter.sub_(LR * momenta[name])
            for name, mask in masks.items():
                weight = model.get_parameter(name)
                chance = torch.rand_like(weight) if case.config["algorithm"] == "set" else gradients[name].abs()
                if step in case.updates:
                    mask.copy_(_next(case, step, weight, mask, chance))
                weight.mul_(mask)
                momenta[name] *= mask
        next_step()
    return losses


def _next(case: SparseCase, step: int, weight: torch.Tensor, mask: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    dim, groups = case.groups
    parts = [t.chunk(groups, dim) for t in (weight, mask, chance)]
    return torch.cat([_next_part(case, step, *part) for part in zip(*parts, strict=True)], dim)


def _next_part(
    case: SparseCase, step: int, weight: torch.Tensor, mask: torch.Tensor, chance: torch.Tensor
) -> torch.Tensor:
    target = round((1 - case.sparsity(step)) * weight.numel())
    flat = torch.zeros(weight.numel(), dtype=torch.bool)
    magnitudes = weight.abs().flatten()
    if case.config["algorithm"] == "gmp":
        flat[magnitudes.topk(target).indices] = True
        return flat.view_as(weight)
    active = mask.flatten().nonzero().flatten()
    kept = active[magnitudes[active].topk(round((1 - case.dropped(step)) * len(active))).indices]
    flat[kept] = True
    rest = (~flat).nonzero().flatten()
    flat[rest[chance.flatten()[rest].topk(target - len(kept)).indices]] = True
    return flat.view_as(weight)
