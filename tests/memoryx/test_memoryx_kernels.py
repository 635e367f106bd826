"""Kernels bound to state buffers: results are right however they overlap with what the kernel reads."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp

from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module
from waferbox.links.shared_memory import SharedMemory
from waferbox.states.kernels import StateKernel, StateKernels

Make: TypeAlias = Callable[[ModuleOp, SharedMemory], StateKernel]


@pytest.fixture(params=["generated", "by torch"])
def kernel_of(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    if request.param == "by torch":
        monkeypatch.setenv("CXX", "/bin/false")
    return lambda module, memory: StateKernels().make({7: print_module(module)}, memory, tmp_path / "kernels")[7]


def states(*shapes: tuple[int, ...]) -> tuple[SharedMemory, list[torch.Tensor]]:
    memory = SharedMemory.create(4096)
    tensors = [memory.tensor(torch.float32, shape, 1024 * number) for number, shape in enumerate(shapes)]
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape) + 100 * number)
    return memory, tensors


def test_swap_of_two_states(kernel_of: Make) -> None:
    memory, (a, b) = states((3, 3), (3, 3))
    builder = GraphBuilder()
    x, y = (builder.argument(tensor_type((3, 3), torch.float32)) for _ in range(2))
    call = kernel_of(builder.finish([(y, None), (x, None)]), memory).bind([a, b], [None, None])
    old_a, old_b = a.clone(), b.clone()
    results = call([a, b])
    assert torch.equal(a, old_b)
    assert torch.equal(b, old_a)
    assert results[0].data_ptr() == a.data_ptr()


def test_transpose_of_a_state_in_place(kernel_of: Make) -> None:
    memory, (a,) = states((3, 3))
    builder = GraphBuilder()
    x = builder.argument(tensor_type((3, 3), torch.float32))
    permutation = builder.dense(torch.tensor([1, 0]))
    turned = builder.op("cirh.Transpose", [x, permutation])[0]
    call = kernel_of(builder.finish([(turned, None)]), memory).bind([a], [None])
    old = a.clone()
    call([a])
    assert torch.equal(a, old.T)


def test_view_of_a_state_is_a_value_of_its_own(kernel_of: Make) -> None:
    memory, (a,) = states((4,))
    builder = GraphBuilder()
    x = builder.argument(tensor_type((4,), torch.float32))
    view = builder.op("cirh.Reshape", [x], types=[tensor_type((2, 2), torch.float32)])[0]
    call = kernel_of(builder.finish([(view, None)]), memory).bind([None], [None])
    (value,) = call([a])
    old = a.clone()
    a.zero_()
    assert torch.equal(value.reshape(4), old)


def test_elementwise_update_goes_straight_into_state_and_place(kernel_of: Make) -> None:
    memory, (a, b) = states((100,), (100,))
    builder = GraphBuilder()
    x, y = (builder.argument(tensor_type((100,), torch.float32)) for _ in range(2))
    total = builder.op("cirh.Add", [x, y])[0]
    difference = builder.op("cirh.Sub", [x, total])[0]
    square = builder.op("cirh.Mul", [x, y])[0]
    module = builder.finish([(total, None), (difference, None), (square, None)])
    place = torch.empty(100)
    call = kernel_of(module, memory).bind([a, b, None], [None, None, place])
    old_a, old_b = a.clone(), b.clone()
    results = call([a, b])
    assert torch.equal(a, old_a + old_b)
    assert torch.equal(b, old_a - (old_a + old_b))
    assert torch.equal(place, old_a * old_b)
    assert results[2] is place


def test_a_kernel_in_parts_does_what_it_does_as_a_whole(tmp_path: Path) -> None:
    """A number that replaces one of the inputs is written when all parts have read it."""
    memory, (a, b, count) = states((3, 7), (3, 7), ())
    builder = GraphBuilder()
    matrix = tensor_type((3, 7), torch.float32)
    x, y = (builder.argument(matrix) for _ in range(2))
    number = builder.argument(tensor_type((), torch.float32))
    wide = builder.op("cirh.BroadcastInDim", [number], {"broadcast_dimensions": []}, types=[matrix])[0]
    following = builder.op("cirh.Add", [number, builder.splat(1.0, (), torch.float32)])[0]
    scaled, added = builder.op("cirh.Mul", [x, wide])[0], builder.op("cirh.Add", [x, y])[0]
    module = builder.finish([(scaled, None), (added, None), (following, None)])
    kernel = StateKernels().make({7: print_module(module)}, memory, tmp_path / "kernels")[7]
    targets = [a, b, count]
    assert kernel.may_be_parted(targets, [None] * 3)
    assert not kernel.may_be_parted([a, None, count], [None] * 3)
    old = [tensor.clone() for tensor in targets]
    for part in range(5):
        kernel.bind(targets, [None] * 3, part=(part, 5))(targets)
    assert torch.equal(a, old[0] * old[2])
    assert torch.equal(b, old[0] + old[1])
    assert count == old[2] + 1


def test_a_plan_that_is_loaded_again_is_not_parsed_and_writes_where_the_states_lie_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = GraphBuilder()
    x = builder.argument(tensor_type((3,), torch.float32))
    text = print_module(builder.finish([(builder.op("cirh.Add", [x, x])[0], None)]))
    kernels = StateKernels()
    parsed: list[str] = []

    def parse(text: str) -> ModuleOp:
        parsed.append(text)
        return parse_module(text)

    monkeypatch.setattr("waferbox.states.kernels.parse_module", parse)
    for _ in range(2):
        memory, (state,) = states((3,))
        before = state.clone()
        kernels.make({7: text}, memory, tmp_path)[7].bind([state], [None])([state])
        assert torch.equal(state, before + before)
    assert parsed == [text]
    kernels.make({7: text, 8: text}, memory, tmp_path)
    assert parsed == [text] * 3
