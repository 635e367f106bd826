"""Kernels that reuse memory, and layers that are divided into sublayers: the same numbers, in less memory."""

import gc
import weakref
from typing import Any

import pytest
import torch
from compiled_steps import always_in_slices, one_at_a_time
from hypothesis import reject
from random_programs import traced_program
from test_row_slices import WIDTH, assert_computes, random_programs, traced, words

from appliance.compiler import micro_batches as micro_batches_module
from appliance.compiler.core.errors import WaferMemoryError
from appliance.compiler.core.target import KernelLibrary, MicroBatching, Target
from appliance.compiler.cost.kernel_profile import profile_kernel
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.plan_check.check import check_plan
from cstorch.errors import CompileError as LoweringError
from waferbox.cirh.calls import products
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.execution.memory_reuse import let_reuse_memory
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module

# --- Kernels


def reusing(text: str) -> str:
    """The text of a kernel that reuses memory."""
    module = parse_module(text)
    let_reuse_memory(module)
    return print_module(module, locations=False)


def check_kernel(text: str, *inputs: torch.Tensor) -> float:
    """Checks that a kernel that reuses memory has the same results. Returns the share of the memory that it needs."""
    expected = Kernel.build(text)([tensor.clone() for tensor in inputs])
    kernel = Kernel.build(reusing(text))
    given = [tensor.clone() for tensor in inputs]
    assert all(torch.equal(*pair) for pair in zip(kernel(list(given)), expected, strict=True))
    assert all(torch.equal(*pair) for pair in zip(given, inputs, strict=True))
    places = [torch.empty_like(tensor) for tensor in expected]
    assert all(torch.equal(*pair) for pair in zip(kernel(given, places), expected, strict=True))
    assert all(torch.equal(*pair) for pair in zip(places, expected, strict=True))
    return profile_kernel(reusing(text)).working_bytes / profile_kernel(text).working_bytes


def test_parts_are_joined_as_soon_as_they_are_made() -> None:
    text = """
    module {
      func @graph(%x: tensor<4x8xf32>) -> (tensor<4x24xf32>) {
        %0 = cirh.Tanh %x : tensor<4x8xf32>
        %1 = cirh.Exp %x : tensor<4x8xf32>
        %2 = cirh.Neg %1 : tensor<4x8xf32>
        %3 = cirh.Concat %0, %x, %2 {axis = 1 : i64} : (tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>)
          -> tensor<4x24xf32>
        return %3 : tensor<4x24xf32>
      }
    }
    """
    # Three parts, and one that is not in its place yet; or three and two that wait.
    assert check_kernel(text, torch.randn(4, 8)) == pytest.approx(3 / 5)


def test_operands_are_written_over() -> None:
    text = """
    module {
      func @graph(%x: tensor<8x8xf32>, %y: tensor<8x8xf32>) -> (tensor<8x8xf32>) {
        %0 = cirh.Mul %x, %y : tensor<8x8xf32>
        %1 = cirh.Exp %0 : tensor<8x8xf32>
        %2 = cirh.Sub %y, %1 : tensor<8x8xf32>
        %3 = cirh.RoundCb16 %2 : tensor<8x8xf32>
        return %3 : tensor<8x8xf32>
      }
    }
    """
    assert check_kernel(text, torch.randn(8, 8), torch.randn(8, 8)) == 1 / 2


@pytest.mark.parametrize(
    "reader",
    [
        "%2 = cirh.Transpose %0, %cst : (tensor<8x8xf32>, tensor<2xi64>) -> tensor<8x8xf32>\n"
        "%3 = cirh.Add %0, %2 : tensor<8x8xf32>\n%4 = cirh.Mul %3, %1 : tensor<8x8xf32>",
        "%2 = cirh.Reshape %0 : (tensor<8x8xf32>) -> tensor<8x8xf32>\n"
        "%3 = cirh.Neg %0 : tensor<8x8xf32>\n%4 = cirh.Mul %3, %2 : tensor<8x8xf32>",
        "%2 = cirh.Cast %0 {Truncate = false} : tensor<8x8xf32> -> tensor<8x8xf32>\n"
        "%3 = cirh.Neg %0 : tensor<8x8xf32>\n%4 = cirh.Mul %2, %3 : tensor<8x8xf32>",
    ],
)
def test_what_another_value_shows_is_not_written_over(reader: str) -> None:
    text = f"""
    module {{
      func @graph(%x: tensor<8x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>) {{
        %cst = cirh.Const dense<[1, 0]> : tensor<2xi64>
        %0 = cirh.Exp %x : tensor<8x8xf32>
        %1 = cirh.Tanh %x : tensor<8x8xf32>
        {reader}
        return %1, %4 : tensor<8x8xf32>, tensor<8x8xf32>
      }}
    }}
    """
    check_kernel(text, torch.randn(8, 8))


def test_an_argument_is_freed_after_its_last_reader() -> None:
    text = """
    module {
      func @graph(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>) {
        %0 = cirh.Exp %x : tensor<8xf32>
        %1 = cirh.Sub %0, %y : tensor<8xf32>
        return %1 : tensor<8xf32>
      }
    }
    """
    inputs = [torch.randn(8), torch.randn(8)]
    freed = [weakref.ref(tensor) for tensor in inputs]
    (result,) = Kernel.build(reusing(text))(inputs)
    gc.collect()
    assert not inputs
    assert [reference() for reference in freed] == [None, None]
    assert result.shape == (8,)
    profile = profile_kernel(reusing(text))
    assert profile.working_bytes_without(frozenset()) == profile.working_bytes == 32
    # The caller holds 64 bytes of arguments, of which none are left.
    assert profile.working_bytes_without(frozenset({0, 1})) == 32


def check_overwriting(text: str, *inputs: torch.Tensor, free: tuple[int, ...], over: tuple[int, ...]) -> int:
    """Checks which of the arguments that are free are written over, and that results stay the same.

    Returns the bytes that the kernel makes beside the arguments.
    """
    profile = profile_kernel(reusing(text))
    results = frozenset(range(len(profile.output_bytes)))
    assert profile.overwritten(frozenset(free), results) == over
    expected = Kernel.build(text)([tensor.clone() for tensor in inputs])
    kernel = Kernel.build(reusing(text)).writing_over(over)
    given = [tensor.clone() for tensor in inputs]
    memory = {given[index].data_ptr() for index in over}
    made = kernel(list(given))
    assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))
    assert memory <= {tensor.data_ptr() for tensor in made}
    kept = [index for index in range(len(inputs)) if index not in over]
    assert all(torch.equal(given[index], inputs[index]) for index in kept)
    # Results that are written to other places leave the arguments as they are.
    given = [tensor.clone() for tensor in inputs]
    places = [torch.empty_like(tensor) for tensor in expected]
    assert all(torch.equal(*pair) for pair in zip(kernel(list(given), places), expected, strict=True))
    return profile.working_bytes_without(frozenset(free), frozenset(over))


def in_two_slices(begin: str, end: str) -> str:
    """A kernel that computes `exp(x) * w` in two slices. begin, end: lines that read parts of x, too."""
    return f"""
    module {{
      func @graph(%x: tensor<1x8x4xf32>, %w: tensor<1x4x4xf32>) -> (tensor<1x8x4xf32>, tensor<1x4x4xf32>) {{
        %0 = aten.slice.Tensor %x {{dim = 1 : i64, start = 0 : i64, end = 4 : i64, step = 1 : i64}}
          : tensor<1x8x4xf32> -> tensor<1x4x4xf32>
        {begin}
        %1 = cirh.Exp %0 : tensor<1x4x4xf32>
        %2 = cirh.Mul %1, %w : tensor<1x4x4xf32>
        %3 = aten.slice.Tensor %x {{dim = 1 : i64, start = 4 : i64, end = 8 : i64, step = 1 : i64}}
          : tensor<1x8x4xf32> -> tensor<1x4x4xf32>
        %4 = cirh.Exp %3 : tensor<1x4x4xf32>
        %5 = cirh.Mul %4, %w : tensor<1x4x4xf32>
        {end}
        %6 = cirh.Concat %2, %5 {{axis = 1 : i64}} : (tensor<1x4x4xf32>, tensor<1x4x4xf32>) -> tensor<1x8x4xf32>
        return %6, %r : tensor<1x8x4xf32>, tensor<1x4x4xf32>
      }}
    }}
    """


X, W = torch.randn(1, 8, 4), torch.randn(1, 4, 4)


def test_slices_are_joined_over_an_argument() -> None:
    text = in_two_slices("", "%r = cirh.Sin %5 : tensor<1x4x4xf32>")
    made = check_overwriting(text, X, W, free=(0,), over=(0,))
    assert check_overwriting(text, X, W, free=(), over=()) - made == X.nbytes
    assert check_overwriting(text, X, W, free=(1,), over=()) > made


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("", "%r = cirh.Sin %0 : tensor<1x4x4xf32>"),  # its place was taken by the first part
        ("%r = cirh.Reshape %0 : (tensor<1x4x4xf32>) -> tensor<1x4x4xf32>", ""),  # a view of it is returned
        (
            "",
            "%7 = aten.slice.Tensor %x {dim = 1 : i64, start = 2 : i64, end = 6 : i64, step = 1 : i64} "
            ": tensor<1x8x4xf32> -> tensor<1x4x4xf32>\n%r = cirh.Neg %7 : tensor<1x4x4xf32>",
        ),
    ],
)
def test_an_argument_that_is_read_afterwards_is_not_joined_over(begin: str, end: str) -> None:
    check_overwriting(in_two_slices(begin, end), X, W, free=(0,), over=())


def test_a_result_is_written_over_an_argument() -> None:
    text = """
    module {
      func @graph(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>) {
        %0 = cirh.Exp %x : tensor<8xf32>
        %1 = cirh.Sub %0, %y : tensor<8xf32>
        return %1 : tensor<8xf32>
      }
    }
    """
    assert check_overwriting(text, torch.randn(8), torch.randn(8), free=(0,), over=(0,)) == 0
    assert check_overwriting(text, torch.randn(8), torch.randn(8), free=(), over=()) == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multiplies_halves", [True, False])
def test_the_gradients_of_a_cross_entropy_need_no_memory_of_their_own(
    dtype: torch.dtype, multiplies_halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: multiplies_halves)
    rows, classes, width = 6, 5, 4
    kind = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    text = f"""
    module {{
      func @graph(%l: tensor<6xf32>, %s: tensor<6xf32>, %g: tensor<6xf32>, %e: tensor<6xf32>, %x: tensor<1x6x4x{kind}>,
          %w: tensor<5x4x{kind}>, %t: tensor<6xi64>) -> (tensor<1x6x4x{kind}>, tensor<5x4x{kind}>) {{
        %0 = cirh.Reshape %x : (tensor<1x6x4x{kind}>) -> tensor<6x4x{kind}>
        %1, %2 = cirh.LinearCrossEntropyGrad %l, %s, %g, %e, %0, %w, %t {{is_trained = true}} : (tensor<6xf32>,
          tensor<6xf32>, tensor<6xf32>, tensor<6xf32>, tensor<6x4x{kind}>, tensor<5x4x{kind}>, tensor<6xi64>)
          -> (tensor<6x4x{kind}>, tensor<5x4x{kind}>)
        %3 = cirh.Reshape %1 : (tensor<6x4x{kind}>) -> tensor<1x6x4x{kind}>
        return %3, %2 : tensor<1x6x4x{kind}>, tensor<5x4x{kind}>
      }}
    }}
    """
    x, weight = torch.randn(1, rows, width).to(dtype), torch.randn(classes, width).to(dtype)
    logsumexp = (x[0].float() @ weight.float().t()).logsumexp(1)
    inputs = [*torch.randn(3, rows), logsumexp, x, weight, torch.arange(rows) % classes]
    check_overwriting(text, *inputs, free=(4,), over=(4,))
    assert Kernel.build(text).direct_results == {1}


# --- Steps


@pytest.mark.parity
@random_programs
def test_random_programs_that_reuse_memory(
    number: int, cut: tuple[int, int], row_slices: int, recomputes: bool
) -> None:
    wafers, micro_batches = cut
    try:
        program, batch = traced_program(number)
    except LoweringError:
        reject()
    settings = {"micro_batches": micro_batches, "row_slices": row_slices, "recomputes": recomputes}
    program.check([batch], [(wafers, 1 + number % 2)], seeds=[number % 5], saves_memory=True, **settings)


@pytest.mark.parity
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("window", [0, 3])
def test_sublayers_compute_what_layers_compute(window: int, micro_batches: int) -> None:
    settings: dict[str, Any] = {
        "row_slices": 4,
        "micro_batches": micro_batches,
        "recomputes": True,
        "saves_memory": True,
    }
    step = traced(window=window)
    labels = {instruction.run.layer for instruction in step.plan(1, **settings).wafer.instructions}
    # Each sublayer has the name of its last module.
    assert {"layers.0.output", "layers.0.down", "layers.1.output backward", "layers.1.down backward"} < labels
    with always_in_slices() as sliced:
        step.check([words(), words()], [(1, 1), (3, 2)], slices_attention=True, **settings)
        plan = step.plan(1, slices_attention=True, **settings)
    assert all("reuses_memory" in text for text in sliced)
    # The gradient of what attention reads is made over that of what it makes.
    runs = [instruction.run for instruction in plan.wafer.instructions]
    over = [list(run.overwritten) for run in runs if run.layer == "layers.0.output backward"]
    assert over == [[0]] * micro_batches
    inductor = step.plan(1, kernel_library=KernelLibrary.INDUCTOR, **settings)
    assert not any("reuses_memory" in kernel.cirh for kernel in inductor.wafer.kernels)


@pytest.mark.parity
def test_sublayers_that_are_run_again() -> None:
    with always_in_slices(), one_at_a_time(kept_at_most=1, keeps_weights=False):
        traced(layers=4).check(
            [words()],
            [(1, 1), (2, 1)],
            row_slices=4,
            micro_batches=3,
            recomputes=True,
            slices_attention=True,
            saves_memory=True,
            seeds=[0, 3],
        )


@pytest.mark.parity
def test_a_layer_that_does_not_fit_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches_module, "_NUMBERS_OF_SLICES", (2, 16))
    long = {"tokens": 1024, "samples": 2}
    step = traced(layers=1, wide=16 * WIDTH, **long)
    settings = {"micro_batches": 2, "recomputes": True, "row_slices": 16, "slices_attention": True}
    # The layer needs 843 KiB, its larger sublayer 683.
    memory = 750 << 10
    with pytest.raises(WaferMemoryError, match="even in slices"):
        step.plan(1, wafer_memory_bytes=memory, **settings)
    target = Target(num_csx=1, num_shards=1, wafer_memory_bytes=memory)
    plan = compile_in_micro_batches(step.text, target, MicroBatching(), lambda: pytest.fail("no time is predicted"))
    check_plan(plan)
    assert "layers.0.down backward" in {instruction.run.layer for instruction in plan.wafer.instructions}
    assert_computes(plan, step, long)
