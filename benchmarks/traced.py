"""A training step, traced and lowered without a cluster, with the seconds of each part."""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import cstorch
from benchmarks.gpt import token_loss
from benchmarks.gpt2_training import BATCH, GPT2, SEQUENCE, VOCABULARY
from cstorch._internal.lowering import lower
from cstorch._internal.state import Registry, named_getters
from cstorch._internal.tracing import move_module, trace_step
from waferbox.cirh.text.printer import print_module


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """CIRH text, and how long each part of the client's work took."""

    text: str
    seconds: Mapping[str, float]


def trace_training(
    model: nn.Module, loss_of: Callable[[nn.Module, Any], torch.Tensor], batch: Any, **settings: Any
) -> TracedStep:
    """A step of AdamW with these settings. The model moves to the tracing device."""
    marks = [time.perf_counter()]
    move_module(model)
    optimizer = cstorch.optim.AdamW(model.parameters(), **settings)
    registry = Registry()
    registry.register("model", model)
    registry.register("optimizer", optimizer)
    marks.append(time.perf_counter())

    def step(inputs: Any) -> torch.Tensor:
        loss = loss_of(model, inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    names = {module: name for name, module in model.named_modules()}
    trace = trace_step(step, batch, named_getters(registry), names, lambda loss: [("loss", loss)])
    marks.append(time.perf_counter())
    module = lower(trace)
    marks.append(time.perf_counter())
    text = print_module(module)
    marks.append(time.perf_counter())
    parts = ("move to the device", "trace", "lower", "print")
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    return TracedStep(text=text, seconds=dict(zip(parts, seconds, strict=True)))


def trace_gpt2() -> TracedStep:
    """A step of GPT-2 small on random tokens."""
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    return trace_training(GPT2(), lambda model, given: token_loss(model(given[0]), given[1]), batch)
