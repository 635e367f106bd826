"""Every optimizer, with settings that reach every branch, and its reference."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import optimizer_references as references
import torch
from optimizer_references import ExactMuon, Reference

from cstorch import optim


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    ours: Callable[[Any], optim.Optimizer]
    reference: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
    only_matrices: bool = False

    def __str__(self) -> str:
        return self.name


def as_torch(name: str, only_matrices: bool = False, **settings: Any) -> Case:
    """Returns the case of an optimizer that equals torch's of the same name and settings."""
    theirs = {"Muon": ExactMuon}.get(name) or getattr(torch.optim, name)
    return Case(
        name=f"{name} {settings}",
        ours=lambda p: getattr(optim, name)(p, **settings),
        reference=lambda p: theirs(p, **settings),
        only_matrices=only_matrices,
    )


def as_rule(name: str, rule: references.Rule, **settings: Any) -> Case:
    return Case(
        name=f"{name} {settings}",
        ours=lambda p: getattr(optim, name)(p, **settings),
        reference=lambda p: Reference(p, rule),
    )


# One of each. All but Muon update tensors of every rank.
BASIC = [
    as_torch("SGD", lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True),
    as_rule("Adam", references.adam(0.01, 1e-6, l2=0.1), lr=0.01, weight_decay=0.1),
    as_rule("AdamW", references.adam(0.01, 1e-6, decoupled=0.1), lr=0.01, weight_decay=0.1),
    as_torch("Adamax", lr=0.05, eps=1e-6, weight_decay=0.01),
    as_torch("NAdam", lr=0.05, weight_decay=0.01),
    as_torch("RAdam", lr=0.05, eps=1e-6, weight_decay=0.01),
    as_torch("Adagrad", lr=0.1, lr_decay=0.1, eps=1e-6, weight_decay=0.01, initial_accumulator_value=0.1),
    as_torch("Adadelta", lr=1.0, eps=1e-6, weight_decay=0.01),
    as_rule("Adafactor", references.adafactor(0.05, 0.1), lr=0.05, weight_decay=0.1),
    as_torch("ASGD", lr=0.02, lambd=0.1, t0=5.0, weight_decay=0.01),
    as_rule("Lamb", references.lamb(0.05, 0.1), lr=0.05, weight_decay=0.1),
    as_rule("Lion", references.lion(0.01, 0.1), lr=0.01, weight_decay=0.1),
    as_torch("RMSprop", lr=0.01, eps=1e-3, momentum=0.9, weight_decay=0.01),
    as_torch("Rprop", lr=0.01),
    as_torch("Muon", only_matrices=True, lr=0.02, weight_decay=0.01),
]
MORE = [
    as_torch("SGD", lr=0.02),
    as_torch("SGD", lr=0.02, weight_decay=0.1),
    as_torch("SGD", lr=0.02, momentum=0.9, maximize=True),
    as_rule("Adam", references.adam(0.05, 1e-2), lr=0.05, eps=1e-2),
    as_rule("AdamW", references.adam(0.05, 1e-2, correct_bias=False), lr=0.05, eps=1e-2, correct_bias=False),
    as_torch("Adamax", lr=0.05, eps=1e-6, betas=(0.8, 0.9), maximize=True),
    as_torch("NAdam", lr=0.05, betas=(0.8, 0.9), momentum_decay=0.1),
    as_torch("RAdam", lr=0.05, betas=(0.8, 0.9), eps=1e-6),
    as_torch("Adagrad", lr=0.1, eps=1e-6, maximize=True),
    as_torch("Adadelta", lr=1.0, rho=0.8, maximize=True),
    as_torch("Adafactor", lr=0.05, eps=(1e-30, 1e-3)),
    as_rule("Adafactor", references.adafactor(0.05, 0.0, scale_parameter=False), lr=0.05, scale_parameter=False),
    as_torch("ASGD", lr=0.02, alpha=0.5, maximize=True),
    as_rule("Lamb", references.lamb(0.05, 0.0, adam=True), lr=0.05, adam=True),
    as_rule("Lion", references.lion(0.01, 0.0), lr=0.01),
    as_torch("RMSprop", lr=0.01, eps=1e-4, alpha=0.9, centered=True),
    as_torch("RMSprop", lr=0.01, eps=1e-4, centered=True, momentum=0.5),
    as_torch("Rprop", lr=0.01, etas=(0.3, 1.5), step_sizes=(1e-3, 0.05)),
    as_torch("Muon", only_matrices=True, lr=0.02, weight_decay=0.0, nesterov=False, ns_steps=3),
]
