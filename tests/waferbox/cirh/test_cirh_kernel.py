"""Running modules: the same numbers as plain PyTorch, into given places, whatever they share."""

import pytest
import torch
from module_examples import F32, mlp_step, mlp_tensors
from torch.nn import functional as F

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.execution.kernel import Kernel, OperationFailed
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.modules.sources import OperationSource, sources_of
from waferbox.cirh.text.printer import print_module


def test_a_training_step_is_that_of_pytorch() -> None:
    inputs = mlp_tensors()
    x, y, *weights = inputs
    w1, b1, w2, b2 = (w.clone().requires_grad_() for w in weights)
    loss = F.cross_entropy(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2), y)
    loss.backward()
    *updated, result = Kernel.build(mlp_step())(inputs)
    assert result.equal(loss.detach())
    for new, old in zip(updated, (w1, b1, w2, b2), strict=True):
        assert old.grad is not None
        torch.testing.assert_close(new, (old - 0.1 * old.grad).detach(), rtol=1e-6, atol=1e-6)


def test_results_are_written_where_they_belong() -> None:
    kernel, inputs = Kernel.build(mlp_step()), mlp_tensors()
    expected = kernel(inputs)
    places = [torch.full_like(tensor, torch.nan) for tensor in expected]
    for _ in range(2):
        results = kernel(inputs, [*places[:-1], None])
        assert all(a is b for a, b in zip(results[:-1], places, strict=False))
        assert all(a.equal(b) for a, b in zip(results, expected, strict=True))


def test_results_may_replace_inputs() -> None:
    kernel, inputs = Kernel.build(mlp_step()), mlp_tensors()
    expected = kernel(inputs)
    kernel(inputs, [*inputs[2:], torch.empty(())])
    assert all(a.equal(b) for a, b in zip(inputs[2:], expected, strict=False))


def test_results_may_overlap_inputs_in_part() -> None:
    builder = GraphBuilder()
    a = builder.argument(tensor_type((4,), F32))
    b = builder.argument(tensor_type((4,), F32))
    (total,) = builder.op("cirh.Add", [a, b])
    (twice,) = builder.op("cirh.Mul", [total, b])
    kernel = Kernel.build(builder.finish([(total, None), (twice, None)]))
    buffer = torch.arange(12.0)
    expected = [t.clone() for t in kernel([buffer[:4], buffer[4:8]])]
    kernel([buffer[:4], buffer[4:8]], [buffer[2:6], buffer[7:11]])
    assert buffer[2:6].equal(expected[0])
    assert buffer[7:11].equal(expected[1])


def test_inputs_may_change_places() -> None:
    builder = GraphBuilder()
    a, b = (builder.argument(tensor_type((3,), F32)) for _ in range(2))
    kernel = Kernel.build(builder.finish([(b, None), (a, None)]))
    one, two = torch.ones(3), torch.full((3,), 2.0)
    kernel([one, two], [one, two])
    assert one.tolist() == [2, 2, 2]
    assert two.tolist() == [1, 1, 1]


def test_a_matrix_may_become_its_transpose() -> None:
    builder = GraphBuilder()
    a = builder.argument(tensor_type((3, 3), F32))
    kernel = Kernel.build(
        builder.finish([(builder.op("cirh.Transpose", [a, builder.dense(torch.tensor([1, 0]))])[0], None)])
    )
    matrix = torch.arange(9.0).reshape(3, 3)
    expected = matrix.t().clone()
    kernel([matrix], [matrix])
    assert matrix.equal(expected)


@pytest.mark.parametrize("value", [2.0, 0.5, -1.0, 3.0])
def test_powers_of_constants_are_those_of_numbers(value: float) -> None:
    builder = GraphBuilder()
    a = builder.argument(tensor_type((5,), F32))
    kernel = Kernel.build(builder.finish([(builder.op("cirh.Pow", [a, builder.splat(value, (5,), F32)])[0], None)]))
    x = torch.rand(5) + 0.1
    assert kernel([x])[0].equal(x**value)
    assert kernel([x], [torch.empty(5)])[0].equal(x**value)


def test_constants_and_broadcasts_of_every_kind() -> None:
    """A value that only constants and broadcasts feed still has its whole shape and its own element type."""
    builder = GraphBuilder()
    row = builder.argument(tensor_type((4,), F32))
    column = builder.argument(tensor_type((3,), F32))
    whole = [tensor_type((3, 4), F32)]
    (a,) = builder.op("cirh.BroadcastInDim", [row], {"broadcast_dimensions": [1]}, types=whole)
    (b,) = builder.op("cirh.BroadcastInDim", [column], {"broadcast_dimensions": [0]}, types=whole)
    (total,) = builder.op("cirh.Add", [a, b])
    (constant,) = builder.op("cirh.Add", [builder.splat(1.0, (3, 4), F32), builder.splat(2.0, (3, 4), F32)])
    (flags,) = builder.op("cirh.Compare", [total, constant], {"comparison_direction": "GT"})
    (chosen,) = builder.op("cirh.Select", [flags, builder.splat(1.0, (3, 4), F32), builder.splat(0.0, (3, 4), F32)])
    (twice,) = builder.op("cirh.Add", [a, a])
    kernel = Kernel.build(builder.finish([(v, None) for v in (total, constant, flags, chosen, twice, a)]))
    r, c = torch.rand(4) * 4, torch.rand(3)
    results = kernel([r, c])
    t = r + c[:, None]
    expected = [t, torch.full((3, 4), 3.0), t > 3, (t > 3).float(), (2 * r).expand(3, 4), r.expand(3, 4)]
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype is wanted.dtype
        assert result.equal(wanted)


def test_values_are_released_after_their_last_use() -> None:
    kernel = Kernel.build(mlp_step())
    dead = [slot for step in kernel._steps for slot in step.dead]
    made = [slot for step in kernel._steps for slot in step.results]
    assert sorted(dead) == sorted(set(made) - set(kernel._results))


def test_wrong_tensors_are_refused() -> None:
    kernel, inputs = Kernel.build(mlp_step()), mlp_tensors()
    with pytest.raises(ValueError, match="5 inputs for a kernel of 6"):
        kernel(inputs[:-1])
    with pytest.raises(ValueError, match="input 1 is"):
        kernel([inputs[0], inputs[1].int(), *inputs[2:]])
    with pytest.raises(ValueError, match="out tensor 0"):
        kernel(inputs, [torch.empty(3), None, None, None, None])
    with pytest.raises(ValueError, match="1 out tensors for a kernel of 5"):
        kernel(inputs, [None])


def test_text_is_verified() -> None:
    text = print_module(mlp_step())
    Kernel.build(text)
    gradient = "transpose_a = true, transpose_b = false} : (tensor<16x32xf32>, tensor<16x8xf32>)"
    assert text.count(gradient) == 1
    with pytest.raises(CirhError, match=r"^train\.py:53 \(in fc1, backward\): cirh\.MatMul"):
        Kernel.build(text.replace(gradient, gradient.replace("true", "false")))


def test_errors_begin_with_the_source() -> None:
    builder = GraphBuilder()
    a, b = builder.argument(tensor_type((3,), F32)), builder.argument(tensor_type((4,), F32))
    with pytest.raises(CirhError, match=r"^train\.py:7 \(in fc\): cirh\.Add: operands of different shapes"):
        builder.op("cirh.Add", [a, b], loc=Source(module="fc", file="train.py", line=7))


@pytest.mark.parametrize("is_read", [False, True])
def test_a_sum_of_terms_is_added_in_its_place(is_read: bool) -> None:
    """Unless another operation reads a sum of the first terms, which must then stay as it is."""
    builder = GraphBuilder()
    a, b, c = (builder.argument(tensor_type((4, 4), F32)) for _ in range(3))
    (first,) = builder.op("cirh.MatMul", [a, b])
    (second,) = builder.op("cirh.MatMul", [b, c])
    (both,) = builder.op("cirh.Add", [first, second])
    (third,) = builder.op("cirh.MatMul", [c, a])
    (total,) = builder.op("cirh.Add", [both, third])
    (other,) = builder.op("cirh.Mul", [both if is_read else a, total])
    kernel = Kernel.build(builder.finish([(total, None), (other, None)]))
    x, y, z = (torch.randn(4, 4) for _ in range(3))
    expected = x @ y + y @ z + z @ x
    place = torch.full((4, 4), torch.nan)
    results = kernel([x, y, z], [place, None])
    assert results[0] is place
    torch.testing.assert_close(place, expected)
    torch.testing.assert_close(results[1], (x @ y + y @ z if is_read else x) * expected)


def test_an_operation_that_fails_for_its_values_is_named() -> None:
    builder = GraphBuilder()
    logits, labels = builder.argument(tensor_type((2, 3), F32)), builder.argument(tensor_type((2, 1), torch.int64))
    source = Source(module="head", op="aten::gather", file="train.py", line=7)
    picked = builder.op("aten.gather", [logits, labels], {"dim": 1, "sparse_grad": False}, loc=source)[0]
    module = builder.finish([(builder.op("cirh.Exp", [picked])[0], None)])
    assert sources_of(body_ops(module)) == (
        OperationSource(operation="aten.gather", source="aten::gather at train.py:7"),
    )
    with pytest.raises(OperationFailed, match="out of bounds") as caught:
        Kernel(module)([torch.tensor([[1.0, torch.nan, 2.0]] * 2), torch.tensor([[0], [3]])])
    assert (caught.value.operation, caught.value.number, caught.value.count) == ("aten.gather", 0, 1)
    assert caught.value.operands == "float32[2, 3] with values that are not finite, int64[2, 1] from 0 to 3"
