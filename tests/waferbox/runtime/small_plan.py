"""A small plan, and the results of a job that runs it.

The model has one weight per shard: y = sum over k of x @ w_k, loss = sum(y * t), so the gradient of each w_k is
x^T @ t; each shard counts its steps, and its learning rate is 0.1 / count.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module
from waferbox.links.elements import aligned, tensor_bytes
from wsc.v1 import plan_pb2

ROWS, INNER, OUTER = 8, 128, 96  # weights of 48 KiB: too large to travel inline
WEIGHTS, GRADIENT, LOSS, BATCH, COUNT, GATHERED = range(1, 7)  # groups; those of shard k: + 10 k


def _type(*shape: int) -> plan_pb2.TensorType:
    return plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=shape)


def _group(
    group: int, kind: "plan_pb2.GroupKind.ValueType", *members: tuple[int, plan_pb2.TensorType], **fields: Any
) -> plan_pb2.Group:
    placed, end = [], 0
    for value, type in members:
        placed.append(plan_pb2.GroupMember(value=value, type=type, offset=end))
        end = aligned(end + tensor_bytes(type))
    return plan_pb2.Group(id=group, kind=kind, members=placed, nbytes=end, **fields)


def _wafer_kernel(num_shards: int) -> str:
    """(x, t, w_0, ...) -> (loss, x^T @ t, y)"""
    b = GraphBuilder()
    x, t = (b.argument(tensor_type((ROWS, n), torch.float32)) for n in (INNER, OUTER))
    weights = [b.argument(tensor_type((INNER, OUTER), torch.float32)) for _ in range(num_shards)]
    flags = {"transpose_a": False, "transpose_b": False}
    y = b.op("cirh.MatMul", [x, weights[0]], flags)[0]
    for weight in weights[1:]:
        y = b.op("cirh.Add", [y, b.op("cirh.MatMul", [x, weight], flags)[0]])[0]
    gradient = b.op("cirh.MatMul", [x, t], {"transpose_a": True, "transpose_b": False})[0]
    loss = b.op("cirh.Mul", [y, t])[0]
    for _ in range(2):
        loss = b.op("cirh.Reduce", [loss], {"dimensions": [0], "keep_dims": [], "reduce_kind": "ADD"})[0]
    return print_module(b.finish([(loss, None), (gradient, None), (y, None)]))


def _count_kernel() -> str:
    """count -> (count + 1, 0.1 / (count + 1))"""
    b = GraphBuilder()
    count = b.argument(tensor_type((), torch.float32))
    count = b.op("cirh.Add", [count, b.splat(1.0, (), torch.float32)])[0]
    rate = b.op("cirh.Div", [b.splat(0.1, (), torch.float32), count])[0]
    return print_module(b.finish([(count, None), (rate, None)]))


def _update_kernel() -> str:
    """(w, dw, rate) -> w - rate * dw"""
    b = GraphBuilder()
    matrix = tensor_type((INNER, OUTER), torch.float32)
    weight, gradient = (b.argument(matrix) for _ in range(2))
    rate = b.argument(tensor_type((), torch.float32))
    wide = b.op("cirh.BroadcastInDim", [rate], {"broadcast_dimensions": []}, types=[matrix])[0]
    step = b.op("cirh.Mul", [gradient, wide])[0]
    return print_module(b.finish([(b.op("cirh.Sub", [weight, step])[0], None)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPlan:
    """The plan for some shards and wafers."""

    num_shards: int
    num_wafers: int
    groups: list[plan_pb2.Group] = field(init=False)

    def __post_init__(self) -> None:
        groups = [
            _group(BATCH, plan_pb2.GROUP_KIND_BATCH, (1, _type(ROWS, INNER)), (2, _type(ROWS, OUTER))),
            _group(
                LOSS, plan_pb2.GROUP_KIND_REDUCTION, (3, _type()), reduction=plan_pb2.REDUCTION_SUM, to_coordinator=True
            ),
            _group(COUNT, plan_pb2.GROUP_KIND_OUTPUT, (60, _type())),
            _group(
                GATHERED,
                plan_pb2.GROUP_KIND_REDUCTION,
                (4, _type(ROWS, OUTER)),
                reduction=plan_pb2.REDUCTION_GATHER,
                to_coordinator=True,
            ),
        ]
        for shard in range(self.num_shards):
            weight = (100 + shard, _type(INNER, OUTER))
            groups.append(_group(WEIGHTS + 10 * shard, plan_pb2.GROUP_KIND_WEIGHTS, weight, source_shard=shard))
        groups.append(
            _group(
                GRADIENT,
                plan_pb2.GROUP_KIND_REDUCTION,
                (5, _type(INNER, OUTER)),
                reduction=plan_pb2.REDUCTION_SUM,
                shards=range(self.num_shards),
            )
        )
        object.__setattr__(self, "groups", groups)

    def wafer(self) -> plan_pb2.WaferPlan:
        weights = [WEIGHTS + 10 * shard for shard in range(self.num_shards)]
        receives = [plan_pb2.Instruction(receive=plan_pb2.Receive(group=g)) for g in [BATCH, *weights]]
        run = plan_pb2.Run(kernel=1, inputs=[1, 2, *(100 + s for s in range(self.num_shards))], outputs=[3, 5, 4])
        sends = [plan_pb2.Instruction(send=plan_pb2.Send(group=g)) for g in (GRADIENT, LOSS, GATHERED)]
        return plan_pb2.WaferPlan(
            groups=[g for g in self.groups if g.id != COUNT],
            kernels=[plan_pb2.Kernel(id=1, cirh=_wafer_kernel(self.num_shards))],
            instructions=[*receives, plan_pb2.Instruction(run=run), *sends],
        )

    def memoryx(self, shard: int) -> plan_pb2.MemoryXPlan:
        weight = 100 + shard
        I = plan_pb2.Instruction  # noqa: E741
        instructions = [
            I(send=plan_pb2.Send(group=WEIGHTS + 10 * shard)),
            I(run=plan_pb2.Run(kernel=1, inputs=[50], outputs=[60, 61], commits=[50, 0])),
            I(receive=plan_pb2.Receive(group=GRADIENT)),
            I(run=plan_pb2.Run(kernel=2, inputs=[weight, 5, 61], outputs=[62], commits=[weight])),
        ]
        if shard == 0:
            instructions.append(I(send=plan_pb2.Send(group=COUNT)))
        kernels = [plan_pb2.Kernel(id=1, cirh=_count_kernel()), plan_pb2.Kernel(id=2, cirh=_update_kernel())]
        states = [
            plan_pb2.StateSlot(value=50, name="count", type=_type(), replicated=True),
            plan_pb2.StateSlot(value=weight, name=f"w{shard}", type=_type(INNER, OUTER)),
        ]
        mine = {WEIGHTS + 10 * shard, GRADIENT} | ({COUNT} if shard == 0 else set())
        return plan_pb2.MemoryXPlan(
            shard=shard,
            states=states,
            groups=[g for g in self.groups if g.id in mine],
            kernels=kernels,
            instructions=instructions,
        )

    def swarmx(self) -> plan_pb2.SwarmXPlan:
        groups = [group for group in self.groups if group.id not in (BATCH, COUNT)]
        return plan_pb2.SwarmXPlan(groups=groups, times=[1] * len(groups))

    def batch(self, wafer: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * wafer + step)
        return torch.randn(ROWS, INNER, generator=generator), torch.randn(ROWS, OUTER, generator=generator)

    def expected(self, num_steps: int) -> "Expected":
        """Returns the results of the same steps in plain torch."""
        weights = [torch.full((INNER, OUTER), 0.01 * (s + 1)) for s in range(self.num_shards)]
        result = Expected()
        for step in range(1, num_steps + 1):
            batches = [self.batch(wafer, step) for wafer in range(self.num_wafers)]
            ys = [x @ sum(weights[1:], weights[0]) for x, _ in batches]
            result.losses.append(float(sum((y * t).sum() for y, (_, t) in zip(ys, batches, strict=True))))
            result.gathered.append(torch.cat(ys))
            gradient = sum((x.T @ t for x, t in batches), torch.zeros(INNER, OUTER))
            weights = [w - 0.1 / step * gradient for w in weights]
            result.weights.append(weights)
        return result


@dataclass(slots=True)
class Expected:
    losses: list[float] = field(default_factory=list)
    gathered: list[torch.Tensor] = field(default_factory=list)
    weights: list[list[torch.Tensor]] = field(default_factory=list)
