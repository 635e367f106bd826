"""Modules that several tests use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from waferbox.cirh.dialect.attributes import AttrValue
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder

SAMPLES = sorted((Path(__file__).parent / "samples").glob("*.mlir"))
F32, F64, I64 = torch.float32, torch.float64, torch.int64


def mlp_step(rows: int = 16) -> ModuleOp:
    """One training step of a network of two layers: cross entropy and SGD, loss as an output."""
    b = GraphBuilder()

    def argument(*shape: int, state: str | None = None, input: str | None = None) -> SSAValue:
        return b.argument(tensor_type(shape, F32), state=state, input=input)

    x = argument(rows, 8, input="input_0")
    y = b.argument(tensor_type((rows,), I64), input="input_1")
    w1, b1 = argument(32, 8, state="state.model.fc1.weight"), argument(32, state="state.model.fc1.bias")
    w2, b2 = argument(4, 32, state="state.model.fc2.weight"), argument(4, state="state.model.fc2.bias")
    fc1 = Source(module="fc1", op="aten::addmm", file="train.py", line=53)
    fc2 = Source(module="fc2", op="aten::addmm", file="train.py", line=54)
    back = Source(module="fc1", backward=True, op="aten::mm", file="train.py", line=53)
    permutation = b.dense(torch.tensor([1, 0]))

    def op(name: str, *operands: Any, loc: Source | None = None, types: Any = None, **attributes: AttrValue) -> Any:
        results = b.op(name, operands, attributes, loc, types=types)
        return results if len(results) > 1 else results[0]

    hidden = op("aten.addmm", b1, x, op("cirh.Transpose", w1, permutation, loc=fc1), loc=fc1)
    active = op("cirh.Relu", hidden, loc=fc1)
    logits = op("aten.addmm", b2, active, op("cirh.Transpose", w2, permutation, loc=fc2), loc=fc2)
    scores = op("aten._log_softmax", logits, dim=1, half_to_float=False)
    loss, count = op("aten.nll_loss_forward", scores, y, reduction=1, ignore_index=-100, operand_segments=[1, 1, 0])
    d_scores = op(
        "aten.nll_loss_backward",
        b.splat(1.0, (), F32),
        scores,
        y,
        count,
        reduction=1,
        ignore_index=-100,
        operand_segments=[1, 1, 1, 0, 1],
    )
    d_logits = op("aten._log_softmax_backward_data", d_scores, scores, dim=1, input_dtype="f32")
    d_active = op("cirh.MatMul", d_logits, w2, transpose_a=False, transpose_b=False)
    d_hidden = op("cirh.ReluGrad", d_active, hidden, loc=back)
    gradients = [
        op("cirh.MatMul", d_hidden, x, transpose_a=True, transpose_b=False, loc=back),
        op("cirh.Reduce", d_hidden, dimensions=[0], keep_dims=[], reduce_kind="ADD", loc=back),
        op("cirh.MatMul", d_logits, active, transpose_a=True, transpose_b=False),
        op("cirh.Reduce", d_logits, dimensions=[0], keep_dims=[], reduce_kind="ADD"),
    ]
    rate = b.splat(0.1, (), F32)
    updated = []
    for weight, gradient in zip((w1, b1, w2, b2), gradients, strict=True):
        whole = op("cirh.BroadcastInDim", rate, types=[weight.type], broadcast_dimensions=[])
        updated.append((op("cirh.Sub", weight, op("cirh.Mul", gradient, whole)), None))
    return b.finish([*updated, (loss, "output_loss")], {2: 0, 3: 1, 4: 2, 5: 3})


def mlp_tensors(rows: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((rows, 8), (32, 8), (32,), (4, 32), (4,))
    x, *weights = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x, torch.randint(0, 4, (rows,), generator=generator), *weights]


def adamw(shape: Sequence[int], dtype: torch.dtype = F32, *, clip: bool = True) -> ModuleOp:
    """AdamW with a clip coefficient: weight, two moments, gradient, and rate, beta powers, coefficient as scalars."""
    b = GraphBuilder()
    whole = tensor_type(shape, dtype)
    p, m, v, g = (b.argument(whole) for _ in range(4))
    rate, power1, power2, coefficient = (b.argument(tensor_type((), dtype)) for _ in range(4))

    def op(name: str, *operands: Any) -> Any:
        return b.op(f"cirh.{name}", operands)[0]

    def full(value: float) -> Any:
        return b.splat(value, shape, dtype)

    def spread(scalar: Any) -> Any:
        return b.op("cirh.BroadcastInDim", [scalar], {"broadcast_dimensions": []}, types=[whole])[0]

    one = b.splat(1.0, (), dtype)
    if clip:
        g = op("Mul", g, spread(coefficient))
    decay = op("Sub", one, op("Mul", rate, b.splat(0.01, (), dtype)))
    new_m = op("Add", op("Mul", m, full(0.9)), op("Mul", g, full(0.1)))
    new_v = op("Add", op("Mul", v, full(0.999)), op("Mul", op("Mul", g, g), full(0.001)))
    spread_power = spread(op("Sqrt", op("Sub", one, power2)))
    denominator = op("Add", op("Div", op("Sqrt", new_v), spread_power), full(1e-8))
    step = op("Mul", op("Div", new_m, denominator), spread(op("Div", rate, op("Sub", one, power1))))
    return b.finish([(op("Sub", op("Mul", p, spread(decay)), step), None), (new_m, None), (new_v, None)])
