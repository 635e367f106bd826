"""Generated loops give what torch gives operation by operation, bit for bit where both are exactly rounded."""

import os
import random
import subprocess
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp

from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.lair.kernel import MAX_BUFFERS, GeneratedKernel, generate
from waferbox.lair.library import NotBuilt, build
from waferbox.lair.lower import NotLowered, lower

SIZE = 1003
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.7, -3.7, float("inf"), float("-inf"), float("nan"), 1e-30, 65504.0]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ONE = ["Sqrt", "Rsqrt", "Abs", "Neg", "Floor", "Ceil", "Round", "Sign", "Reciprocal", "Relu"]
# torch's vector versions of these are off by one unit in the last place.
NOT_EXACT = ["Sqrt", "Rsqrt", "root"]
EXACT = [name for name in ONE if name not in NOT_EXACT]
TWO = ["cirh.Add", "cirh.Sub", "cirh.Mul", "cirh.Div", "aten.maximum", "aten.minimum", "cirh.ReluGrad"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels") / "kernels"


def numbers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SIZE, generator=generator) * 3
    special = torch.tensor(SPECIAL)
    where = torch.randperm(SIZE, generator=generator)[: 10 * len(SPECIAL)]
    values[where] = special.repeat(10)
    return values.to(dtype)


def run(kernel: GeneratedKernel, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = [torch.empty(type.shape, dtype=type.dtype) for type in kernel.outputs]
    kernel.bind(outputs)(inputs)
    return outputs


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str, *, rtol: float = 0) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_operation_on_every_kind_of_number(dtype: torch.dtype, folder: Path) -> None:
    builder = GraphBuilder()
    x, y, low, high = (builder.argument(tensor_type((SIZE,), dtype)) for _ in range(4))
    made = {name: builder.op(f"cirh.{name}", [x])[0] for name in ONE}
    made |= {name: builder.op(name, [x, y])[0] for name in TWO}
    compared = {
        name: builder.op("cirh.Compare", [x, y], {"comparison_direction": name})[0]
        for name in ("EQ", "NE", "LT", "LE", "GT", "GE")
    }
    made |= compared
    made["Not"] = builder.op("cirh.Not", [compared["LT"]])[0]
    for name in ("And", "Or", "Xor"):
        made[name] = builder.op(f"cirh.{name}", [compared["LT"], compared["NE"]])[0]
    made["Select"] = builder.op("cirh.Select", [compared["LT"], x, y])[0]
    made["isnan"] = builder.op("aten.isnan", [x])[0]
    made["Clamp"] = builder.op("cirh.Clamp", [x, low, high])[0]
    for name, exponent in [("square", 2.0)] + [("root", 0.5)] * (dtype.itemsize >= 4):
        made[name] = builder.op("cirh.Pow", [x, builder.splat(exponent, (SIZE,), dtype)])[0]
    for kind in (*FLOATS, torch.bool):
        made[f"Cast to {kind}"] = builder.op("cirh.Cast", [x], types=[tensor_type((SIZE,), kind)])[0]
    module = builder.finish([(value, None) for value in made.values()])
    kernel = generate({0: module}, folder)[0]
    inputs = [numbers(dtype, 1), numbers(dtype, 2), numbers(dtype, 3).nan_to_num(0).clamp(max=0), numbers(dtype, 4)]
    inputs[3] = inputs[3].nan_to_num(1).abs() + 1
    rounding = torch.finfo(dtype).eps
    for name, actual, expected in zip(made, run(kernel, inputs), Kernel.build(module)(inputs), strict=True):
        assert_same(actual, expected, name, rtol=rounding if name in NOT_EXACT else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_operations_of_several_statements(dtype: torch.dtype, folder: Path) -> None:
    builder = GraphBuilder()
    x, y, z = (builder.argument(tensor_type((SIZE,), dtype)) for _ in range(3))
    made = {f"lerp {w}": builder.op("aten.lerp.Scalar", [x, y], {"weight": w})[0] for w in (0.0, 0.25, 0.75, 1.0)}
    made["lerp"] = builder.op("aten.lerp.Tensor", [x, y, z])[0]
    made |= {name: builder.op(f"aten.{name}", [x, y, z], {"value": -0.3})[0] for name in ("addcmul", "addcdiv")}
    module = builder.finish([(value, None) for value in made.values()])
    kernel = generate({0: module}, folder)[0]
    inputs = [torch.rand(SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype) + 0.5 for seed in range(3)]
    rounding = 4 * torch.finfo(dtype).eps  # torch joins a product and a sum to one operation in places
    for name, actual, expected in zip(made, run(kernel, inputs), Kernel.build(module)(inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding, msg=name)


def test_numbers_are_computed_once_with_functions_of_the_c_library(folder: Path) -> None:
    builder = GraphBuilder()
    x, y = (builder.argument(tensor_type((), torch.float64)) for _ in range(2))
    made = {name: builder.op(f"cirh.{name}", [x])[0] for name in ("Exp", "Log", "Tanh", "Sin", "Cos")}
    made |= {name: builder.op(name, [x])[0] for name in ("aten.log1p", "aten.expm1", "aten.trunc")}
    made |= {name: builder.op(f"cirh.{name}", [x, y])[0] for name in ("Pow", "Atan2")}
    module = builder.finish([(value, None) for value in made.values()])
    kernel = generate({0: module}, folder)[0]
    for inputs in ([0.3, 1.7], [4.0, -2.0]):
        tensors = [torch.tensor(number, dtype=torch.float64) for number in inputs]
        for name, actual, expected in zip(made, run(kernel, tensors), Kernel.build(module)(tensors), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-15, atol=0, msg=partial("{}: {}".format, name))


def random_module(seed: int) -> ModuleOp:
    """A chain of operations over whole tensors and numbers, with constants, casts and several results."""
    choose = random.Random(seed)
    builder = GraphBuilder()
    kind = choose.choice(FLOATS)
    matrix = tensor_type((7, 11), kind)
    whole = [builder.argument(matrix) for _ in range(3)]
    single = [builder.argument(tensor_type((), kind)) for _ in range(2)]
    for _ in range(choose.randint(2, 12)):
        if choose.random() < 0.3:
            single.append(builder.op(choose.choice(TWO), choose.choices(single, k=2))[0])
        elif choose.random() < 0.3:
            (value,) = builder.op(
                "cirh.BroadcastInDim",
                [choose.choice(single)],
                {"broadcast_dimensions": []},
                types=[matrix],
            )
            whole.append(value)
        elif choose.random() < 0.2:
            whole.append(builder.splat(choose.choice([0.1, -3.0, 0.999]), (7, 11), kind))
        elif choose.random() < 0.5:
            whole.append(builder.op(f"cirh.{choose.choice(EXACT)}", [choose.choice(whole)])[0])
        else:
            whole.append(builder.op(choose.choice(TWO), choose.choices(whole, k=2))[0])
    return builder.finish([(whole[-1], None), (choose.choice(whole), None), (choose.choice(single), None)])


def test_random_programs(folder: Path) -> None:
    modules = {seed: random_module(seed) for seed in range(60)}
    kernels = generate(modules, folder)
    assert kernels.keys() == modules.keys()
    for seed, kernel in kernels.items():
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(type.shape, generator=generator).to(type.dtype) for type in kernel.inputs]
        for actual, expected in zip(run(kernel, inputs), Kernel.build(modules[seed])(inputs), strict=True):
            assert_same(actual, expected, f"program {seed}")


def momentum(size: int) -> ModuleOp:
    """weight, momentum, gradient, rate -> new momentum, new weight, rate halved."""
    builder = GraphBuilder()
    kind = tensor_type((size,), torch.float32)
    weight, velocity, gradient = (builder.argument(kind) for _ in range(3))
    rate = builder.argument(tensor_type((), torch.float32))
    (kept,) = builder.op("cirh.Mul", [velocity, builder.splat(0.9, (size,), torch.float32)])
    (new_velocity,) = builder.op("cirh.Add", [kept, gradient])
    (whole,) = builder.op("cirh.BroadcastInDim", [rate], {"broadcast_dimensions": []}, types=[kind])
    (change,) = builder.op("cirh.Mul", [new_velocity, whole])
    (new_weight,) = builder.op("cirh.Sub", [weight, change])
    (half,) = builder.op("cirh.Mul", [rate, builder.splat(0.5, (), torch.float32)])
    return builder.finish([(new_velocity, None), (new_weight, None), (half, None)])


def test_results_may_lie_where_arguments_do(folder: Path) -> None:
    module = momentum(1000)
    kernel = generate({0: module}, folder)[0]
    weight, velocity, gradient = (torch.randn(1000) for _ in range(3))
    rate = torch.tensor(0.1)
    bound = kernel.bind([velocity, weight, rate])
    for _ in range(3):  # the second call finds the same tensors, the third another gradient
        expected = Kernel.build(module)([tensor.clone() for tensor in (weight, velocity, gradient, rate)])
        bound([weight, velocity, gradient, rate])
        for actual, wanted in zip((velocity, weight, rate), expected, strict=True):
            assert_same(actual, wanted, "in place")
        gradient = gradient.clone() + 1


def test_what_only_passes_is_not_kept(folder: Path) -> None:
    module = momentum(1000)
    kernel = generate({0: module}, folder)[0]
    weight, velocity, rate = torch.randn(1000), torch.randn(1000), torch.tensor(0.1)
    bound = kernel.bind([velocity, weight, rate], passing=[2])
    for _ in range(2):
        gradient = torch.randn(1000)
        expected = Kernel.build(module)([tensor.clone() for tensor in (weight, velocity, gradient, rate)])
        bound([weight, velocity, gradient, rate])
        for actual, wanted in zip((velocity, weight, rate), expected, strict=True):
            assert_same(actual, wanted, "passing")
        kept = weakref.ref(gradient)
        del gradient
        assert kept() is None


def test_inputs_that_overlap_results_otherwise_or_have_strides_are_read_first(folder: Path) -> None:
    module = momentum(1000)
    kernel = generate({0: module}, folder)[0]
    memory = torch.randn(3000)
    weight, velocity, gradient = memory[:1000], memory[500:1500], memory[1000:3000:2]
    rate = memory[7]
    outputs = [memory[100:1100], memory[1100:2100], memory[2500]]
    bound = kernel.bind(outputs)
    for _ in range(2):
        expected = Kernel.build(module)([tensor.clone() for tensor in (weight, velocity, gradient, rate)])
        bound([weight, velocity, gradient, rate])
        for actual, wanted in zip(outputs, expected, strict=True):
            assert_same(actual, wanted, "overlapping")


def test_modules_that_differ_in_shape_share_a_loop(folder: Path) -> None:
    kernels = generate({1: momentum(10), 2: momentum(500)}, folder)
    assert kernels[1]._function is kernels[2]._function
    assert str(lower(momentum(10))) == str(lower(momentum(500)))


@pytest.mark.parametrize(("pairs", "is_generated"), [(MAX_BUFFERS // 2, True), (MAX_BUFFERS // 2 + 1, False)])
def test_a_loop_over_very_many_tensors_is_left_to_torch(pairs: int, is_generated: bool, folder: Path) -> None:
    """The compiler would take a minute for the update of 2,000 parameters of one element."""
    builder = GraphBuilder()
    values = [builder.argument(tensor_type((1,), torch.float32)) for _ in range(pairs)]
    outputs = [(builder.op("cirh.Add", [value, value])[0], None) for value in values]
    assert (0 in generate({0: builder.finish(outputs)}, folder)) is is_generated


def test_empty_tensors(folder: Path) -> None:
    builder = GraphBuilder()
    x = builder.argument(tensor_type((0, 3), torch.float32))
    rate = builder.argument(tensor_type((), torch.float32))
    outputs = [builder.op("cirh.Add", [value, value])[0] for value in (x, rate)]
    kernel = generate({0: builder.finish([(value, None) for value in outputs])}, folder)[0]
    _, twice = run(kernel, [torch.empty(0, 3), torch.tensor(3.0)])
    assert twice.item() == 6.0


def test_wrong_tensors_are_refused(folder: Path) -> None:
    kernel = generate({0: momentum(4)}, folder)[0]
    outputs = [torch.empty(4), torch.empty(4), torch.empty(())]
    with pytest.raises(ValueError, match=r"an out tensor is torch.float32\[5\], not torch.float32\[4\]"):
        kernel.bind([torch.empty(5), *outputs[1:]])
    with pytest.raises(ValueError, match=r"an input is torch\.float64"):
        kernel.bind(outputs)([torch.empty(4).double(), *[torch.empty(4)] * 2, torch.empty(())])
    with pytest.raises(ValueError, match="3 inputs for a kernel of 4"):
        kernel.bind(outputs)([torch.empty(4)] * 3)


def test_half_precision_is_not_rounded_where_torch_does_not(folder: Path) -> None:
    builder = GraphBuilder()
    x = builder.argument(tensor_type((4,), torch.bfloat16))
    with pytest.raises(NotLowered, match="in half precision"):
        lower(builder.finish([(builder.op("aten.addcmul", [x, x, x], {"value": 1})[0], None)]))


@pytest.mark.parametrize(
    ("name", "reason"), [("Tanh", "a tanh for each element"), ("Gelu", "a cirh.Gelu"), ("MatMul", "a cirh.MatMul")]
)
def test_what_is_not_worth_a_loop_is_left_to_torch(name: str, reason: str, folder: Path) -> None:
    builder = GraphBuilder()
    x = builder.argument(tensor_type((4, 4), torch.float32))
    module = builder.finish([(builder.op(f"cirh.{name}", [x] * (2 if name == "MatMul" else 1))[0], None)])
    with pytest.raises(NotLowered, match=reason):
        lower(module)
    assert generate({0: module}, folder) == {}


def test_a_damaged_library_is_made_again(tmp_path: Path) -> None:
    kernels = [lower(momentum(3))]
    build(kernels, tmp_path / "k")
    (library,) = (tmp_path / "k").iterdir()
    whole = library.read_bytes()
    library.unlink()  # it is mapped: what is written there would be in this process at once
    library.write_bytes(whole[: len(whole) // 2])
    build(kernels, tmp_path / "k")
    (again,) = (tmp_path / "k").iterdir()
    assert len(again.read_bytes()) == len(whole)


def test_builds_of_the_same_at_the_same_time_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    run = subprocess.run

    def run_together(*arguments: Any, **settings: Any) -> Any:
        both.wait()
        done = run(*arguments, **settings)
        both.wait()
        return done

    monkeypatch.setattr(subprocess, "run", run_together)
    with ThreadPoolExecutor(2) as pool:
        for functions in pool.map(lambda _: build([lower(momentum(3))], tmp_path / "k"), range(2)):
            assert len(functions) == 1
    assert [path.suffix for path in (tmp_path / "k").iterdir()] == [".so"]


def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    (tmp_path / "k").chmod(0o777)
    with pytest.raises(NotBuilt, match="others can write"):
        build([lower(momentum(3))], tmp_path / "k")


@pytest.mark.parametrize("compiler", ["/bin/false", "/nowhere/c++"])
def test_without_a_working_compiler_the_reason_is_said(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "CXX", compiler)
    with pytest.raises(NotBuilt, match=compiler):
        build([lower(momentum(3))], tmp_path / "k")
    assert list((tmp_path / "k").iterdir()) == []
