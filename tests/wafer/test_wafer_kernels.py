"""The kernel libraries of a wafer give the same."""

import errno
import os
import weakref
from pathlib import Path

import pytest
import torch

from wafer.kernels import CACHE_VARIABLE, InductorKernel, WaferKernel, WaferKernels
from waferbox.cirh import CirhError
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.execution.kernel import Kernel, OperationFailed
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module
from wsc.v1 import plan_pb2

INDUCTOR = plan_pb2.KERNEL_LIBRARY_INDUCTOR


def layer() -> str:
    """A product of picked rows, a bias, an activation and a sum over rows; the input is a result too."""
    builder = GraphBuilder()
    x, w = (builder.argument(tensor_type((8, 8), torch.float32)) for _ in range(2))
    bias = builder.argument(tensor_type((8,), torch.float32))
    places = builder.argument(tensor_type((8,), torch.int64))
    attributes = {"padding_idx": -1, "scale_grad_by_freq": False, "sparse": False}
    (picked,) = builder.op("aten.embedding", [x, places], attributes)
    active = builder.op("cirh.Tanh", [builder.op("aten.addmm", [bias, picked, w])[0]])[0]
    (total,) = builder.op("cirh.Reduce", [active], {"dimensions": [0], "keep_dims": [], "reduce_kind": "ADD"})
    return print_module(builder.finish([(active, None), (total, None), (x, None)]))


def noise() -> str:
    builder = GraphBuilder()
    low, high = (builder.argument(tensor_type((), torch.float32)) for _ in range(2))
    shape = builder.dense(torch.tensor([4]))
    drawn = builder.op(
        "cirh.RandomUniform",
        [low, high, shape],
        {"operand_segments": [1, 1, 1, 0, 0]},
        types=[tensor_type((4,), torch.float32)],
    )
    return print_module(builder.finish([(drawn[0], None)]))


def made(text: str, library: "plan_pb2.KernelLibrary.ValueType") -> WaferKernel:
    return WaferKernels().make([plan_pb2.Kernel(id=3, cirh=text)], library)[3]


@pytest.mark.cluster  # it calls the C++ compiler, for seconds
def test_generated_kernels_give_what_torch_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAFERBOX_CACHE", str(tmp_path))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in ((8, 8), (8, 8), (8,))]
    inputs.append(torch.tensor([7, 0, 0, 1, 3, 5, 2, 4]))
    with torch.inference_mode():
        plain = made(layer(), plan_pb2.KERNEL_LIBRARY_ATEN)
        expected = plain(inputs, [None] * 3)
        kernel = made(layer(), INDUCTOR)
        assert isinstance(kernel, InductorKernel)
        place = torch.empty(8)
        for _ in range(2):
            results = kernel(inputs, [None, place, None])
            for result, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)
            assert results[1] is place
        # What other kernels made of a part of a tensor, or turned: parts of attention's one product, for example.
        strided = [torch.cat([inputs[0], inputs[0]], dim=1)[:, :8], inputs[1].t().contiguous().t(), *inputs[2:]]
        assert not any(tensor.is_contiguous() for tensor in strided[:2])
        for result, wanted in zip(kernel(strided, [None, place, None]), expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)
        inputs[3][5] = 8
        for each in (plain, kernel):
            with pytest.raises(OperationFailed) as caught:
                each(inputs, [None, place, None])
            assert caught.value.operation == "aten.embedding"
            assert caught.value.operands.endswith("int64[8] from 0 to 8")


def test_a_full_disk_under_inductors_code_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    import torch._inductor
    from torch._inductor.exc import InductorError

    def refuse(*arguments: object) -> None:
        raise InductorError(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None)

    monkeypatch.setattr(torch._inductor, "compile", refuse)
    assert isinstance(made(layer(), INDUCTOR), Kernel)
    (message,) = (record.message for record in caplog.records if record.name == "advice.inductor")
    assert message.startswith(
        f"Layers run operation by operation, as Inductor's code cannot be kept in {tmp_path}: No space left on device ("
    )


def test_random_numbers_are_left_to_their_own_library() -> None:
    assert isinstance(made(noise(), INDUCTOR), Kernel)


def test_text_that_is_not_valid_is_refused() -> None:
    with pytest.raises(CirhError):
        made("module {}", INDUCTOR)


def test_a_plan_that_is_loaded_again_has_its_kernels_at_once_and_another_takes_their_place() -> None:
    texts, kernels = [layer(), noise()], WaferKernels()
    plan = [plan_pb2.Kernel(id=number, cirh=text) for number, text in enumerate(texts)]
    first = kernels.make(plan, plan_pb2.KERNEL_LIBRARY_ATEN)
    assert kernels.make(plan, plan_pb2.KERNEL_LIBRARY_ATEN) == first
    place = weakref.ref(given := torch.empty(8))
    first[0](
        [torch.ones(8, 8), torch.ones(8, 8), torch.ones(8), torch.zeros(8, dtype=torch.int64)], [None, given, None]
    )
    del given
    assert place() is not None
    kernels.release()
    assert place() is None
    (kept,) = kernels.make(plan[1:], plan_pb2.KERNEL_LIBRARY_ATEN).values()
    assert kept is first[1]
    third = kernels.make(plan, plan_pb2.KERNEL_LIBRARY_ATEN)
    assert third[1] is first[1]
    assert third[0] is not first[0]
