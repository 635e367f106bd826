"""Random numbers: the same in whatever parts they are drawn, distributed as they should be, and keyed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from module_examples import SAMPLES

from waferbox.cirh import CirhError
from waferbox.cirh.calls.random_numbers import Numbers, Part, bernoulli, draw, integers, normal, uniform
from waferbox.cirh.dialect.attributes import AttrValue
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.parser import parse_module

F32, F64, F16, BF16, I64 = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64
KINDS = {
    "uniform f32": uniform(F32, 0, 1),
    "uniform f64": uniform(F64, -2, 3),
    "uniform f16": uniform(F16, 0, 1),
    "uniform bf16": uniform(BF16, 0, 1),
    "normal f32": normal(F32, 0, 1),
    "normal f64": normal(F64, 1, 2),
    "normal bf16": normal(BF16, 0, 1),
    "bernoulli": bernoulli(0.3),
    "integers": integers(I64, -3, 1000),
    "large integers": integers(I64, 0, 1 << 60),
}
COUNT = 100_000


def drawn(numbers: Numbers, key: int = 1, count: int = COUNT) -> torch.Tensor:
    return draw(numbers, key, (count,)).double()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=25, database=None, derandomize=True)
def test_parts_are_those_of_the_whole(kind: str, data: st.DataObject) -> None:
    numbers = KINDS[kind]
    before, outer, count, rest = (data.draw(st.integers(1, 3)) for _ in range(4))
    after = data.draw(st.sampled_from([1, 3, 40, 1500, 5000]))
    part, key = Part(1, outer, count), data.draw(st.integers(0, (1 << 64) - 1))
    whole = draw(numbers, key, (before, outer * count * rest, after))
    blocks = whole.view(before, outer, count, rest, after)
    local = (before, outer * rest, after)
    for index in range(count):
        assert draw(numbers, key, local, part, [index]).equal(blocks[:, :, index].reshape(local))
    assert draw(numbers, key, whole.shape, part, range(count)).equal(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_do_not_depend_on_how_many_are_drawn(kind: str) -> None:
    whole = draw(KINDS[kind], 3, (COUNT,))
    for count in (1, 2, 7, 8191, 16385, 40_000):
        assert draw(KINDS[kind], 3, (count,)).equal(whole[:count])


def test_the_numbers_of_a_key_stay_what_they_are() -> None:
    """What was trained with them can be trained again by a later version."""
    assert draw(bernoulli(0.5), 7, (16,)).long().tolist() == [1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("numbers", "mean", "variance"),
    [
        (KINDS["uniform f32"], 0.5, 1 / 12),
        (KINDS["uniform f64"], 0.5, 25 / 12),
        (KINDS["uniform f16"], 0.5 - 2**-12, 1 / 12),
        (KINDS["uniform bf16"], 0.5 - 2**-9, 1 / 12),
        (KINDS["normal f32"], 0, 1),
        (KINDS["normal f64"], 1, 4),
        (KINDS["normal bf16"], 0, 1),
        (bernoulli(0.3), 0.3, 0.21),
        (bernoulli(1e-3), 1e-3, 1e-3 * (1 - 1e-3)),
        (integers(I64, 0, 10), 4.5, 99 / 12),
    ],
)
def test_mean_and_variance(numbers: Numbers, mean: float, variance: float) -> None:
    """Each within four of its standard deviations, for three keys."""
    for key in (1, 2, 1 << 40):
        values = drawn(numbers, key)
        assert abs(float(values.mean()) - mean) < 4 * math.sqrt(variance / COUNT)
        fourth = float(((values - mean) ** 4).mean())
        assert abs(float(((values - mean) ** 2).mean()) - variance) < 4 * math.sqrt((fourth - variance**2) / COUNT)


@pytest.mark.parametrize(
    "kind", ["uniform f32", "uniform f64", "uniform f16", "uniform bf16", "normal f32", "normal f64"]
)
def test_chi_square(kind: str) -> None:
    """64 classes of equal probability: of 63 degrees of freedom, 126 is beyond the quantile 0.99999."""
    values = drawn(KINDS[kind])
    if kind == "uniform f64":
        values = (values + 2) / 5
    if kind.startswith("normal"):
        values = torch.special.ndtr(values if kind == "normal f32" else (values - 1) / 2)
    counts = torch.bincount((values * 64).long(), minlength=64).double()
    assert float(((counts - COUNT / 64) ** 2).sum() / (COUNT / 64)) < 126


def test_neighbours_operations_and_steps_do_not_go_together() -> None:
    numbers = KINDS["normal f64"]
    values = (drawn(numbers, 1) - 1) / 2
    others = [values.roll(1), values.roll(2)] + [(drawn(numbers, key) - 1) / 2 for key in (2, 1 + (1 << 40), 1 << 64)]
    for other in others:
        assert abs(float((values * other).mean())) < 4 / math.sqrt(COUNT)


def test_edges() -> None:
    assert not draw(bernoulli(0.0), 1, (1000,)).any()
    assert draw(bernoulli(1.0), 1, (1000,)).all()
    assert draw(uniform(F32, 0, 1), 1, (0, 3)).shape == (0, 3)
    assert draw(uniform(F32, 0, 1), 1, ()).shape == ()
    assert draw(integers(I64, 5, 6), 1, (100,)).eq(5).all()
    values = drawn(KINDS["integers"])
    assert values.min() == -3
    assert values.max() == 999
    assert drawn(KINDS["uniform f32"]).max() < 1
    assert drawn(KINDS["normal f32"]).isfinite().all()


def random_op(
    name: str, operands: list[torch.Tensor], result: tuple[int, ...], dtype: torch.dtype, **attributes: AttrValue
) -> torch.Tensor:
    builder = GraphBuilder()
    values = [builder.argument(tensor_type(tensor.shape, tensor.dtype)) for tensor in operands]
    made = builder.op(f"cirh.{name}", values, attributes, types=[tensor_type(result, dtype)])
    return Kernel.build(builder.finish([(made[0], None)]))(operands)[0]


def test_keys_and_seeds() -> None:
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    keyed = [random_op("RandomNormal", [zero, one, torch.tensor(key)], (50,), F32) for key in (3, 3, 4, -4)]
    assert keyed[0].equal(keyed[1])
    assert not keyed[0].equal(keyed[2])
    assert not keyed[2].equal(keyed[3])
    seeded = [random_op("RandomNormal", [zero, one], (50,), F32, seed=seed) for seed in (1, 1, 2)]
    assert seeded[0].equal(seeded[1])
    assert not seeded[0].equal(seeded[2])


def test_a_step_of_the_real_client_drops_the_same_each_time() -> None:
    """Its operation has a seed and no key."""
    module = parse_module(next(path for path in SAMPLES if path.stem == "tfm").read_text())
    kernel = Kernel.build(module)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.rand(type.shape, generator=generator).to(type.dtype)
        if type.dtype.is_floating_point
        else torch.zeros(type.shape, dtype=type.dtype)
        for type in kernel.inputs
    ]
    first, second = kernel(inputs), kernel(inputs)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert all(result.isfinite().all() for result in first)


@pytest.mark.parametrize(
    ("name", "operands", "result", "dtype", "attributes", "message"),
    [
        ("RandomNormal", [torch.zeros(3), torch.tensor(1.0)], (3,), F32, {}, "single floating point"),
        ("RandomNormal", [torch.tensor(0.0), torch.tensor(1.0)], (3,), I64, {}, "floating point numbers, not"),
        ("RandomBernoulli", [torch.tensor(1)], (3,), F32, {"probability": 0.5}, "makes bool"),
        ("RandomBernoulli", [torch.tensor(1)], (3,), torch.bool, {"probability": 1.5}, "not between 0 and 1"),
        ("RandomBernoulli", [torch.tensor(1.0)], (3,), torch.bool, {"probability": 0.5}, "single int64"),
        ("RandomBernoulli", [torch.zeros(2, dtype=I64)], (3,), torch.bool, {"probability": 0.5}, "single int64"),
        ("RandomInteger", [torch.tensor(1)], (3,), I64, {"low": 3, "high": 3}, "no range"),
        ("RandomInteger", [torch.tensor(1)], (3,), I64, {"low": -(2**62) * 2, "high": 5}, "no range"),
        ("RandomInteger", [torch.tensor(1)], (3,), I64, {"low": 0, "high": 3, "part": [0, 1, 2]}, "without wafers"),
    ],
)
def test_impossible_ones_are_refused(
    name: str,
    operands: list[torch.Tensor],
    result: tuple[int, ...],
    dtype: torch.dtype,
    attributes: dict[str, AttrValue],
    message: str,
) -> None:
    with pytest.raises(CirhError, match=message):
        random_op(name, operands, result, dtype, **attributes)


@pytest.mark.parametrize("part", [[], [0, 1], [1, 1, 2], [-1, 1, 2], [0, 0, 2], [0, 1, 0], [0, 4, 2]])
def test_impossible_parts_are_refused(part: list[int]) -> None:
    operands = [torch.tensor(1), torch.tensor([0])]
    with pytest.raises(CirhError, match="part"):
        random_op("RandomInteger", operands, (3,), I64, low=0, high=3, **({"part": part} if part else {}))


def test_the_shape_operand_is_that_of_the_whole() -> None:
    builder = GraphBuilder()
    low, high = (builder.splat(bound, (), F32) for bound in (0.0, 1.0))
    shape = builder.dense(torch.tensor([3, 4]))
    with pytest.raises(CirhError, match=r"shape \[3, 4\] is not that of the whole tensor, \[4, 3\]"):
        builder.op("cirh.RandomUniform", [low, high, shape], types=[tensor_type((4, 3), F32)])
