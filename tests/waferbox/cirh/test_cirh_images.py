"""Pooling, convolutions and group norms as the vendor's client writes them, against torch: any shape and setting."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cirh_examples import Example
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import AttrValue
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.verify import verify

Tensor = torch.Tensor
F64 = torch.float64
LAYOUTS = {3: "NCL", 4: "NCHW", 5: "NCDHW"}
SOME = settings(max_examples=150, deadline=None, derandomize=True)


def filled(*shape: int) -> Tensor:
    """Different numbers in an order that is none: with equal ones the place of a maximum would not matter."""
    draws = torch.Generator().manual_seed(sum(shape))
    return torch.randperm(torch.Size(shape).numel(), generator=draws).reshape(shape).to(F64) / 7 - 1


def _made(name: str, operands: list[Tensor], attributes: dict[str, Any]) -> list[Tensor]:
    """What an operation makes that says itself of which types its results are."""
    return Kernel.build(Example(f"cirh.{name}", operands, attributes, None, (), [], None).module())(operands)


def run(name: str, operands: list[Tensor], attributes: dict[str, Any], *made: torch.Size) -> Any:
    types = [(shape, F64) for shape in made]
    example = Example(f"cirh.{name}", operands, attributes, None, (), types, None)
    module = example.module()
    verify(module)
    results = Kernel.build(module)(operands)
    return results if len(made) > 1 else results[0]


def gradients(function: Callable[..., Tensor], gradient: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves), leaves, gradient)


@st.composite
def pools(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The size of images, and the arguments of torch's pooling, in three dimensions as the client writes all."""
    sizes = tuple(draw(st.integers(1, 9)) for _ in range(3))
    window = tuple(draw(st.integers(1, min(4, size))) for size in sizes)
    padding = tuple(draw(st.integers(0, width // 2)) for width in window)
    stride = draw(st.none() | st.tuples(*[st.integers(1, 4)] * 3))
    return sizes, {"kernel_size": window, "stride": stride, "padding": padding, "ceil_mode": draw(st.booleans())}


def written(given: dict[str, Any]) -> dict[str, Any]:
    """What the client writes: strides of 1 for none, and no ceil_mode."""
    return {
        "data_format": "NCDHW",
        "dilation": [1] * 5,
        "ksize": [1, 1, *given["kernel_size"]],
        "strides": [1, 1, *(given["stride"] or (1, 1, 1))],
        "padding": [0, 0, 0, 0, *(pad for pad in given["padding"] for _ in range(2))],
    }


@SOME
@given(pools(), st.sampled_from(["MAX", "AVERAGE"]))
def test_pooling_is_that_of_torch_or_refused(case: tuple[tuple[int, ...], dict[str, Any]], kind: str) -> None:
    sizes, settings = case
    image = filled(2, 3, *sizes)
    function = F.max_pool3d if kind == "MAX" else F.avg_pool3d

    def pool(x: Tensor) -> Tensor:
        made: Tensor = function(x, **settings)
        return made

    expected = pool(image)
    attributes = {**written(settings), "pool_type": kind}
    if (kind == "AVERAGE" and any(settings["padding"])) or _has_two_readings(image, settings, expected.shape):
        with pytest.raises(CirhError, match=r"count_include_pad|the text is the same for both"):
            run("Pool", [image, image], attributes, expected.shape)
        return
    torch.testing.assert_close(run("Pool", [image, image], attributes, expected.shape), expected)
    gradient = filled(*expected.shape)
    made = run("Pool", [image, gradient], {**attributes, "gradient": True}, image.shape)
    torch.testing.assert_close(made, gradients(pool, gradient, image)[0])


def _has_two_readings(image: Tensor, settings: dict[str, Any], made: torch.Size) -> bool:
    """Whether no stride and a stride of 1, of which the text is the same, make as much, and it matters."""
    if settings["stride"] not in (None, (1, 1, 1)):
        return False
    other = None if settings["stride"] else (1, 1, 1)
    shapes = [F.max_pool3d(image, **{**settings, "stride": other, "ceil_mode": ceil}).shape for ceil in (False, True)]
    windows = zip(made[2:], settings["kernel_size"], strict=True)
    return made in shapes and any(size > 1 and width > 1 for size, width in windows)


def test_strides_that_the_size_does_not_tell_apart_are_refused_with_a_way_out() -> None:
    given: dict[str, Any] = {"kernel_size": (1, 2, 2), "stride": None, "padding": (0, 0, 0), "ceil_mode": True}
    image = filled(2, 3, 1, 3, 3)
    with pytest.raises(CirhError, match=r"stride=1.*ceil_mode=True.*write the stride"):
        run("Pool", [image, image], {**written(given), "pool_type": "MAX"}, F.max_pool3d(image, **given).shape)


def test_a_plain_max_pool_without_a_stride_is_that_of_torch() -> None:
    """F.max_pool2d(x, 2)."""
    image = filled(16, 8, 1, 16, 16)
    given: dict[str, Any] = {"kernel_size": (1, 2, 2), "stride": None, "padding": (0, 0, 0)}
    made = run("Pool", [image, image], {**written(given), "pool_type": "MAX"}, torch.Size((16, 8, 1, 8, 8)))
    torch.testing.assert_close(made[:, :, 0], F.max_pool2d(image[:, :, 0], 2))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Shapes of images and kernels, and the arguments of torch's convolution."""
    rank, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    each = {
        "stride": [draw(st.integers(1, 3)) for _ in range(rank)],
        "padding": [draw(st.integers(0, 2)) for _ in range(rank)],
        "dilation": [draw(st.integers(1, 2)) for _ in range(rank)],
    }
    kernel = [draw(st.integers(1, 3)) for _ in range(rank)]
    image = [draw(st.integers(1, 7)) for _ in range(rank)]
    spans = [d * (k - 1) + 1 for d, k in zip(each["dilation"], kernel, strict=True)]
    assume(all(n + 2 * p >= span for n, p, span in zip(image, each["padding"], spans, strict=True)))
    return (2, 4, *image), (8, 4 // groups, *kernel), {**each, "groups": groups}


@SOME
@given(convolutions())
def test_convolutions_and_their_gradients_are_those_of_torch(
    case: tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]],
) -> None:
    image, kernel, settings = filled(*case[0]), filled(*case[1]), case[2]
    function = getattr(F, f"conv{image.dim() - 2}d")

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        made: Tensor = function(x, weight, None, **settings)
        return made

    expected = convolve(image, kernel)
    gradient = filled(*expected.shape)
    by_image, by_kernel = gradients(convolve, gradient, image, kernel)
    attributes = {**settings, "data_format": LAYOUTS[image.dim()]}
    for direction, operands, wanted in (
        ("FWD", [image, kernel], expected),
        ("BWD_INPUT", [gradient, kernel], by_image),
        ("BWD_KERNEL", [image, gradient], by_kernel),
    ):
        passed = {**attributes, "conv_pass_direction": direction, "transposed": direction == "BWD_INPUT"}
        torch.testing.assert_close(run("Convolution", operands, passed, wanted.shape), wanted)


@SOME
@given(convolutions(), st.integers(0, 2))
def test_transposed_convolutions_and_their_gradients_are_those_of_torch(
    case: tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], more: int
) -> None:
    """The channels are 8, to 4."""
    (samples, _, *sizes), kernel, settings = case[0], filled(*case[1]), case[2]
    image = filled(samples, 8, *sizes)
    limits = zip(settings["stride"], settings["dilation"], strict=True)
    padded = {**settings, "output_padding": [min(more, max(s, d) - 1) for s, d in limits]}
    function = getattr(F, f"conv_transpose{len(sizes)}d")

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        made: Tensor = function(x, weight, None, **padded)
        return made

    spans = zip(*(settings[name] for name in ("stride", "dilation", "padding")), kernel.shape[2:], sizes, strict=True)
    # The rest that a plain convolution leaves over is less than its stride: so much the client can say.
    assume(all(pad < stride for pad, stride in zip(padded["output_padding"], settings["stride"], strict=True)))
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + 1 > 0 for s, d, p, k, n in spans))
    expected = convolve(image, kernel)
    gradient = filled(*expected.shape)
    by_image, by_kernel = gradients(convolve, gradient, image, kernel)
    attributes = {**settings, "data_format": LAYOUTS[image.dim()]}
    for direction, operands, wanted in (
        ("FWD", [image, kernel], expected),
        ("BWD_INPUT", [gradient, kernel], by_image),
        ("BWD_KERNEL", [gradient, image], by_kernel),
    ):
        passed = {**attributes, "conv_pass_direction": direction, "transposed": direction != "BWD_INPUT"}
        torch.testing.assert_close(run("Convolution", operands, passed, wanted.shape), wanted)


@SOME
@given(st.lists(st.integers(1, 4), max_size=3), st.sampled_from([1, 2, 3, 6]), st.booleans(), st.booleans())
def test_group_norms_and_their_gradients_are_those_of_torch(
    sizes: list[int], groups: int, in_rows: bool, has_weights: bool
) -> None:
    assume(6 // groups * torch.Size(sizes).numel() > 1)
    image, weights = filled(3, 6, *sizes), [filled(6), filled(6) + 1]
    layout = {2: "NC", **LAYOUTS}[image.dim()]
    attributes: dict[str, AttrValue] = {"data_format": layout, "num_groups": groups, "affine": has_weights}
    # The client writes weights in rows of a group each.
    rows = [weight.reshape(groups, -1) if in_rows else weight for weight in weights]

    def norm(x: Tensor, *weights: Tensor) -> Tensor:
        scale, offset = weights or (None, None)
        return F.group_norm(x, groups, scale, offset, eps=1e-3)

    example = Example(
        "cirh.GroupNorm", [image, *rows * has_weights], {**attributes, "epsilon": 1e-3}, None, (), [], None
    )
    (made,) = Kernel.build(example.module())([image, *rows * has_weights])
    torch.testing.assert_close(made, norm(image, *weights * has_weights))
    if has_weights:
        gradient = filled(*image.shape) ** 2
        back = Example(
            "cirh.GroupNormGrad", [gradient, image, rows[0]], {**attributes, "epsilon": 1e-3}, None, (), [], None
        )
        results = Kernel.build(back.module())([gradient, image, rows[0]])
        wanted = gradients(norm, gradient, image, *weights)
        for result, expected in zip(results, wanted, strict=True):
            torch.testing.assert_close(result.reshape(expected.shape), expected)
