"""A reference of asynchronous updates in plain PyTorch: the order of a plan's instructions gives each weight's age."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from wafer.regions import RegionOrder
from wsc.v1 import plan_pb2


class Use(NamedTuple):
    """One use of a layer's weight."""

    kind: str  # forward, backward or update
    layer: int
    micro_batch: int


def uses_of(plan: plan_pb2.PipelinePlan) -> list[Use]:
    """Returns the uses of the weights of a Sequential, in order."""
    order = RegionOrder(plan, 1)
    layers = {}
    for slot in plan.states:
        _, owner, *name = slot.name.split(".")
        if owner == "model" and name[-1] == "weight":
            layers[slot.value] = int(name[-2])
    uses: list[Use] = []
    for place in order.threads[0]:
        run = order.instructions[place].run
        if any(run.commits):
            uses += [Use("update", layers[state], run.micro_batch) for state in run.commits if state in layers]
        elif not run.layer.endswith("update"):
            kind = "backward" if run.layer.endswith("backward") else "forward"
            uses += [Use(kind, layers[value], run.micro_batch) for value in run.inputs if value in layers]
    return uses


def train_with_delays(
    model: nn.Sequential,
    make_optimizer: Callable[[Any], Any],
    batches: Sequence[torch.Tensor],
    loss_of_part: Callable[[torch.Tensor, int, int], torch.Tensor],
    uses: Sequence[Use],
    micro_batches: int,
) -> list[float]:
    """Trains a network of linear layers, and returns the losses.

    loss_of_part(result, step, micro-batch) returns a micro-batch's share of the loss.
    """
    layers: list[Any] = list(model)
    optimizers = [make_optimizer(layer.parameters()) for layer in layers]
    losses = []
    for step, batch in enumerate(batches):
        inputs = {(0, k): part for k, part in enumerate(batch.chunk(micro_batches))}
        gradients: dict[tuple[int, int], torch.Tensor] = {}
        losses.append(0.0)
        for kind, number, k in uses:
            layer = layers[number]
            match kind:
                case "forward":
                    inputs[number + 1, k] = result = F.linear(inputs[number, k], layer.weight, layer.bias).detach()
                    if number + 1 == len(layers):
                        share = loss_of_part(result.requires_grad_(), step, k)
                        (gradients[number + 1, k],) = torch.autograd.grad(share, result)
                        losses[-1] += share.item()
                case "backward":
                    gradients[number, k] = gradients[number + 1, k] @ layer.weight.detach()
                case "update":
                    layer.weight.grad = gradients[number + 1, k].T @ inputs[number, k].detach()
                    layer.bias.grad = gradients[number + 1, k].sum(0)
                    optimizers[number].step()
    return losses
