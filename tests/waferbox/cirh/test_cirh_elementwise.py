"""Element-by-element kernels: the numbers of the plain kernel to the last bit, in place, in few blocks."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from module_examples import F32, F64, adamw, mlp_step
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

import waferbox.cirh.execution.elementwise as elementwise
from waferbox.cirh.dialect.attributes import AttrValue
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.execution.elementwise import ElementwiseKernel
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder


def tensors(shape: tuple[int, ...], dtype: torch.dtype = F32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    p, m, g = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3))
    v = torch.rand(shape, generator=generator, dtype=dtype)
    scalars = (1e-3, 0.9**3, 0.999**3, 0.7)
    return [p, m, v, g, *(torch.tensor(s, dtype=dtype) for s in scalars)]


@pytest.fixture(params=[7, 64])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that a test has many of them, and a rest."""
    monkeypatch.setattr(elementwise, "BLOCK", request.param)
    monkeypatch.setattr(elementwise, "_SCRATCH", elementwise._Scratch())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", [(1,), (6,), (7,), (64,), (65,), (20, 33)])
@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16])
def test_adamw_in_place(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module, inputs = adamw(shape, dtype), tensors(shape, dtype)
    expected = Kernel.build(module)(inputs)
    kernel = ElementwiseKernel.build(module)
    assert kernel is not None
    for _ in range(2):
        given = [tensor.clone() for tensor in inputs]
        kernel(given, given[:3])
        for new, wanted in zip(given, expected, strict=False):
            assert new.equal(wanted)
        assert given[3].equal(inputs[3])


def test_adamw_needs_three_blocks_of_its_own() -> None:
    kernel = ElementwiseKernel.build(adamw((100_000,)))
    assert kernel is not None
    given = tensors((100_000,))
    kernel(given, given[:3])
    (layout,) = kernel._layouts.values()
    assert len(layout.scratch) <= 3
    assert layout.copies == []


@pytest.mark.usefixtures("small_blocks")
def test_outputs_may_be_any_inputs_or_overlap_them() -> None:
    module = adamw((100,))
    inputs = tensors((100,))
    expected = Kernel.build(module)(inputs)
    kernel = ElementwiseKernel.build(module)
    assert kernel is not None
    for order in itertools.permutations(range(4), 3):
        given = [tensor.clone() for tensor in inputs]
        kernel(given, [given[i] for i in order])
        for i, wanted in zip(order, expected, strict=True):
            torch.testing.assert_close(given[i], wanted, rtol=1e-6, atol=1e-6)
    buffer = torch.zeros(600)
    given = [buffer[i * 100 : i * 100 + 100].copy_(t) for i, t in enumerate(inputs[:4])] + inputs[4:]
    places = [buffer[50:150], buffer[230:330], buffer[450:550]]
    kernel(given, places)
    for place, wanted in zip(places, expected, strict=True):
        torch.testing.assert_close(place, wanted, rtol=1e-6, atol=1e-6)


def test_strided_tensors() -> None:
    module, inputs = adamw((20, 30)), tensors((20, 30))
    expected = Kernel.build(module)(inputs)
    kernel = ElementwiseKernel.build(module)
    assert kernel is not None
    given = [t.t().contiguous().t() if t.dim() else t for t in inputs]
    places = [torch.empty(30, 20).t() for _ in range(3)]
    kernel(given, places)
    for place, wanted in zip(places, expected, strict=True):
        torch.testing.assert_close(place, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [3, 20])
def test_a_transposed_input_may_lie_in_an_output(size: int) -> None:
    builder = GraphBuilder()
    a, b = (builder.argument(tensor_type((size, size), F32)) for _ in range(2))
    kernel = ElementwiseKernel.build(builder.finish([(builder.op("cirh.Sub", [a, b])[0], None)]))
    assert kernel is not None
    matrix = torch.rand(size, size)
    expected = matrix - matrix.t()
    kernel([matrix, matrix.t()], [matrix])
    assert matrix.equal(expected)


def test_scalars_that_are_replaced_are_read_first() -> None:
    builder = GraphBuilder()
    vector = tensor_type((200_000,), F32)
    weight = builder.argument(vector)
    step = builder.argument(tensor_type((), F32))
    (whole,) = builder.op("cirh.BroadcastInDim", [step], {"broadcast_dimensions": []}, types=[vector])
    (total,) = builder.op("cirh.Add", [weight, whole])
    (following,) = builder.op("cirh.Add", [step, builder.splat(1.0, (), F32)])
    kernel = ElementwiseKernel.build(builder.finish([(following, None), (total, None), (following, None)]))
    assert kernel is not None
    w, s, other = torch.zeros(200_000), torch.tensor(3.0), torch.tensor(0.0)
    kernel([w, s], [s, w, other])
    assert (s.item(), other.item(), w.unique().tolist()) == (4.0, 4.0, [3.0])


def _only(name: str, attributes: dict[str, AttrValue]) -> ModuleOp:
    builder = GraphBuilder()
    a = builder.argument(tensor_type((6,), F32))
    return builder.finish([(builder.op(name, [a], attributes)[0], None)])


def test_other_modules_are_left_to_the_plain_kernel() -> None:
    assert ElementwiseKernel.build(mlp_step()) is None
    assert ElementwiseKernel.build(_only("cirh.Reduce", {"dimensions": [0], "reduce_kind": "ADD"})) is None
    assert ElementwiseKernel.build(_only("aten.flip", {"dims": [0]})) is None
    builder = GraphBuilder()
    a = builder.argument(tensor_type((6,), F32))
    (b,) = builder.op("cirh.Relu", [a])
    assert ElementwiseKernel.build(builder.finish([(a, None), (b, None)])) is None


def test_wrong_tensors_are_refused() -> None:
    kernel = ElementwiseKernel.build(adamw((6,)))
    assert kernel is not None
    inputs = tensors((6,))
    with pytest.raises(ValueError, match="input 0 is"):
        kernel([torch.zeros(7), *inputs[1:]], inputs[:3])
    with pytest.raises(ValueError, match="2 out tensors"):
        kernel(inputs, inputs[:2])


@st.composite
def programs(draw: st.DrawFn) -> tuple[ModuleOp, list[torch.Tensor], list[int]]:
    """A random element-by-element module, its inputs, and which inputs its outputs replace."""
    builder = GraphBuilder()
    whole = tensor_type((50,), F64)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    vectors = [builder.argument(whole) for _ in range(3)]
    scalars = [builder.argument(tensor_type((), F64)) for _ in range(2)]
    inputs = [torch.rand(50, generator=generator, dtype=F64) + 0.5 for _ in vectors]
    inputs += [torch.rand((), generator=generator, dtype=F64) + 0.5 for _ in scalars]
    made = []

    def spread() -> SSAValue:
        if draw(st.booleans()):
            return builder.splat(draw(st.sampled_from([0.5, 2.0, -1.0, 0.25])), (50,), F64)
        return builder.op(
            "cirh.BroadcastInDim", [draw(st.sampled_from(scalars))], {"broadcast_dimensions": []}, types=[whole]
        )[0]

    for _ in range(draw(st.integers(1, 10))):
        kind = draw(
            st.sampled_from(
                ["Add", "Sub", "Mul", "Div", "Add", "Sub", "Mul", "Sqrt", "Neg", "addcmul", "scalar", "Select"]
            )
        )
        x = draw(st.sampled_from(vectors))
        y = spread() if draw(st.integers(0, 2)) == 0 else draw(st.sampled_from(vectors))
        if kind == "scalar":
            scalars.append(builder.op("cirh.Mul", [draw(st.sampled_from(scalars)), draw(st.sampled_from(scalars))])[0])
            continue
        if kind in ("Sqrt", "Neg"):
            (result,) = builder.op(
                "cirh.Sqrt" if kind == "Sqrt" else "cirh.Neg", [builder.op("cirh.Abs", [x])[0] if kind == "Sqrt" else x]
            )
        elif kind == "addcmul":
            (result,) = builder.op("aten.addcmul", [x, y, draw(st.sampled_from(vectors))], {"value": 0.5})
        elif kind == "Select":
            (flags,) = builder.op("cirh.Compare", [x, y], {"comparison_direction": "GT"})
            (result,) = builder.op("cirh.Select", [flags, y, x])
        else:
            (result,) = builder.op(f"cirh.{kind}", [x, y] if draw(st.booleans()) else [y, x])
        vectors.append(result)
        made.append(result)
    if not made:
        made = [builder.op("cirh.Neg", [vectors[0]])[0]]
    results = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3))
    places = draw(st.permutations(range(3)))[: len(results)]
    return builder.finish([(result, None) for result in results]), inputs, list(places)


@settings(max_examples=100)
@given(programs())
def test_random_programs_in_place(case: tuple[ModuleOp, list[torch.Tensor], list[int]]) -> None:
    module, inputs, places = case
    expected = [t.clone() for t in Kernel.build(module)(inputs)]
    kernel = ElementwiseKernel.build(module)
    if kernel is None:  # only scalars in some operation
        return
    given_tensors = [t.clone() for t in inputs]
    kernel(given_tensors, [given_tensors[i] for i in places])
    for i, wanted in zip(places, expected, strict=True):
        torch.testing.assert_close(given_tensors[i], wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_a_product_is_rounded_before_it_is_added() -> None:
    builder = GraphBuilder()
    a, b, c = (builder.argument(tensor_type((4,), F32)) for _ in range(3))
    (product,) = builder.op("cirh.Mul", [a, b])
    kernel = ElementwiseKernel.build(builder.finish([(builder.op("cirh.Add", [product, c])[0], None)]))
    assert kernel is not None
    x, y = torch.tensor([-3e38, 1e38, 1.1, 0.1]), torch.tensor([-2.5, -3.7, 1.3, 0.3])
    z, out = torch.tensor([-torch.inf, torch.inf, -1.43, -0.03]), torch.empty(4)
    kernel([x, y, z], [out])
    torch.testing.assert_close(out, x * y + z, rtol=0, atol=0, equal_nan=True)
