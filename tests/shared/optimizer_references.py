"""Reference update rules, written as formulas, for optimizers of the Cerebras API that differ from torch's."""

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch

Rule = Callable[[torch.Tensor, torch.Tensor, dict[str, Any], int], None]


class Reference(torch.optim.Optimizer):
    """An optimizer that calls rule(parameter, gradient, state of the parameter, step from 1)."""

    def __init__(self, params: Iterable[torch.Tensor], rule: Rule) -> None:
        super().__init__(params, {})
        self.rule, self.count = rule, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1
        for p in self.param_groups[0]["params"]:
            self.rule(p, p.grad, self.state[p], self.count)


def moments(g: torch.Tensor, state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * g * g
    return m, v


def adam(lr: float, eps: float, *, l2: float = 0.0, decoupled: float = 0.0, correct_bias: bool = True) -> Rule:
    """eps is added before the bias is corrected, and the powers of the betas are kept in float32.

    They begin with the betas: 1 - beta2^t loses two digits, so that the first updates are right to 1e-5 only.
    """

    def rule(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], t: int) -> None:
        m, v = moments(g + l2 * p, state)
        u = m / (v.sqrt() + eps)
        power1, power2 = state.get("powers", (torch.tensor(0.9), torch.tensor(0.999)))
        state["powers"] = power1 * 0.9, power2 * 0.999
        if correct_bias:
            u = u * ((1 - power2).sqrt() / (1 - power1))
        p.sub_(lr * (u + decoupled * p))

    return rule


def lamb(lr: float, weight_decay: float, *, adam: bool = False) -> Rule:
    def rule(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], t: int) -> None:
        m, v = moments(g, state)
        u = m / (v.sqrt() + 1e-6) + weight_decay * p
        own, other = min(p.norm().item(), 10), u.norm().item()
        p.sub_(lr * (own / other if own and other and not adam else 1) * u)

    return rule


def lion(lr: float, weight_decay: float) -> Rule:
    def rule(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], t: int) -> None:
        m = state.get("m", torch.zeros_like(p))
        p.mul_(1 - lr * weight_decay)
        p.sub_(lr * (0.9 * m + 0.1 * g).sign())
        state["m"] = 0.99 * m + 0.01 * g

    return rule


def adafactor(lr: float, weight_decay: float, *, scale_parameter: bool = True) -> Rule:
    def rms(x: torch.Tensor) -> float:
        return x.norm().item() / x.numel() ** 0.5

    def rule(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], t: int) -> None:
        beta = 1 - t**-0.8
        v = state["v"] = beta * state.get("v", 0) + (1 - beta) * (g * g + 1e-30)
        if p.ndim > 1:  # Means are linear, so those of v equal the running means that an implementation keeps.
            rows, columns = v.mean(-1, keepdim=True), v.mean(-2, keepdim=True)
            v = rows * columns / rows.mean(-2, keepdim=True)
        u = g / v.sqrt()
        u = u / max(1, rms(u))
        rate = lr * max(1e-3, rms(p)) if scale_parameter else lr
        p.sub_(rate * weight_decay * p)
        p.sub_(rate * u)

    return rule


class ExactMuon(torch.optim.Muon):
    """torch's Muon, with the iteration in the type of the parameters."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            step: Callable[[], object] = super().step
            step()
