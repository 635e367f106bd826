"""The compiler as the coordinator uses it: what the client says of a compile is checked, and reaches the plan."""

from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.coordinator.compilation import CompileRefused, cached_compiler
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module
from wsc.v1 import plan_pb2


def product() -> str:
    builder = GraphBuilder()
    x = builder.argument(tensor_type((8, 70), torch.float32), input="input_0")
    weight = builder.argument(tensor_type((70, 70), torch.float32), state="state.model.weight")
    (made,) = builder.op("cirh.MatMul", [x, weight], {"transpose_a": False, "transpose_b": False})
    return print_module(builder.finish([(made, "output_0")]))


def test_the_precision_reaches_the_plan_and_its_name(tmp_path: Path) -> None:
    compile_step = cached_compiler(tmp_path, tmp_path)
    precision = plan_pb2.Precision(half=plan_pb2.HALF_TYPE_BFLOAT16, optimization_level=2)
    plain, float32, _ = compile_step(product(), 2, 1, {}, plan_pb2.CompileOptions())
    mixed, bfloat16, _ = compile_step(product(), 2, 1, {}, plan_pb2.CompileOptions(precision=precision))
    assert plain != mixed
    assert not float32.HasField("precision")
    assert bfloat16.precision == precision
    again, _, cached = compile_step(product(), 2, 1, {}, plan_pb2.CompileOptions(precision=precision))
    assert (again, cached) == (mixed, True)


@pytest.mark.parametrize(
    ("half", "level", "message"),
    [
        (plan_pb2.HALF_TYPE_UNSPECIFIED, 1, "no half precision 0"),
        (9, 1, "no half precision 9"),
        (plan_pb2.HALF_TYPE_FLOAT16, 3, "one of 0, 1 and 2, not 3"),
    ],
)
def test_a_precision_that_does_not_exist_is_refused(tmp_path: Path, half: Any, level: int, message: str) -> None:
    precision = plan_pb2.Precision(half=half, optimization_level=level)
    with pytest.raises(CompileRefused, match=message):
        cached_compiler(tmp_path, tmp_path)(product(), 1, 1, {}, plan_pb2.CompileOptions(precision=precision))


def test_the_kernel_library_reaches_the_plan_and_its_name(tmp_path: Path) -> None:
    compile_step = cached_compiler(tmp_path, tmp_path)
    inductor = plan_pb2.CompileOptions(kernel_library=plan_pb2.KERNEL_LIBRARY_INDUCTOR)
    plain, aten, _ = compile_step(product(), 2, 1, {}, plan_pb2.CompileOptions())
    other, generated, _ = compile_step(product(), 2, 1, {}, inductor)
    assert plain != other
    assert aten.wafer.kernel_library == plan_pb2.KERNEL_LIBRARY_ATEN
    assert generated.wafer.kernel_library == plan_pb2.KERNEL_LIBRARY_INDUCTOR
    with pytest.raises(CompileRefused, match="no kernel library 7"):
        compile_step(product(), 2, 1, {}, plan_pb2.CompileOptions(kernel_library=7))  # type: ignore[arg-type]


def test_what_wafers_may_hold_reaches_the_plan_and_a_refusal_says_where_to_set_it(tmp_path: Path) -> None:
    compile_step = cached_compiler(tmp_path, tmp_path)
    plain, usual, _ = compile_step(product(), 2, 1, {}, plan_pb2.CompileOptions())
    other, large, _ = compile_step(product(), 2, 1, {}, plan_pb2.CompileOptions(wafer_memory_bytes=9 << 30))
    assert plain != other
    assert (usual.wafer.memory_bytes, large.wafer.memory_bytes) == (8 << 30, 9 << 30)
    with pytest.raises(CompileRefused, match=r"it has \(100 B\).*cstorch\.backends\.csx\.debug\.wafer_memory_gi = 1$"):
        compile_step(product(), 2, 1, {}, plan_pb2.CompileOptions(wafer_memory_bytes=100))


def test_the_execution_strategy_and_the_replicas_reach_the_plan_and_its_name(tmp_path: Path) -> None:
    compile_step = cached_compiler(tmp_path, tmp_path)
    streamed, plan, _ = compile_step(product(), 1, 1, {}, plan_pb2.CompileOptions())
    assert not plan.HasField("pipeline")
    asked = plan_pb2.CompileOptions(execution_strategy=plan_pb2.EXECUTION_STRATEGY_PIPELINE)
    pipelined, plan, _ = compile_step(product(), 1, 1, {}, asked)
    assert [len(plan.pipeline.regions), plan.pipeline.num_replicas] == [1, 1]
    asked.num_replicas = 2
    replicated, plan, _ = compile_step(product(), 1, 1, {}, asked)
    assert plan.pipeline.num_replicas == 2
    assert len({streamed, pipelined, replicated}) == 3
    assert compile_step(product(), 1, 1, {}, asked)[0::2] == (replicated, True)
    with pytest.raises(CompileRefused, match="weight_streaming"):
        compile_step(product(), 2, 1, {}, asked)
    with pytest.raises(CompileRefused, match="no execution strategy 7"):
        compile_step(product(), 1, 1, {}, plan_pb2.CompileOptions(execution_strategy=7))  # type: ignore[arg-type]
