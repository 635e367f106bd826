"""Failures of kernels name the user's line."""

import errno

import pytest
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from appliance.compiler.partition.groups import KernelTable
from waferbox.cirh.execution.kernel import OperationFailed
from waferbox.cirh.modules.sources import OperationSource
from waferbox.runtime.node_job import JobFailure
from waferbox.states.kernel_failures import KernelFailures
from wsc.v1 import node_pb2, plan_pb2

EMBEDDING = "aten.embedding"


def sources(*lines: int, operation: str = EMBEDDING) -> list[OperationSource]:
    return [OperationSource(operation=operation, source=f"aten::embedding at train.py:{line}") for line in lines]


def message(table: KernelTable, layer: str, *, number: int = 0, count: int = 1, operation: str = EMBEDDING) -> str:
    error = OperationFailed(IndexError("too large"), operation, number, count, "int64[8] from 0 to 7")
    failure = KernelFailures(table.sources()).failure(plan_pb2.Run(kernel=1, layer=layer), 6, error)
    assert isinstance(failure, JobFailure)
    assert failure.kind == node_pb2.Failure.KIND_INPUT
    return failure.message


def test_layers_that_share_a_kernel_have_lines_of_their_own() -> None:
    table = KernelTable()
    assert [table.number("text", layer, sources(line)) for layer, line in (("a", 3), ("b", 3), ("c", 9))] == [1, 1, 1]
    assert len(table.sources()) == 2
    assert message(table, "a").startswith("step 6, aten::embedding at train.py:3: too large. Its operands are int64[8]")
    assert "train.py:3:" in message(table, "b")
    assert "train.py:9:" in message(table, "c")


def test_operations_of_one_name_are_told_apart() -> None:
    table = KernelTable()
    table.number("text", "a", [*sources(3, 5), *sources(8, operation="cirh.Add")])
    assert "train.py:5:" in message(table, "a", number=1, count=2)
    assert "train.py:8:" in message(table, "a", operation="cirh.Add")
    # A kernel that computes rows in slices has each operation several times.
    assert "train.py:3 or aten::embedding at train.py:5:" in message(table, "a", number=5, count=6)


def test_runs_without_layers_are_not_told_apart() -> None:
    table = KernelTable()
    for line in (3, 9, 3):
        table.number("text", sources=sources(line))
    assert "train.py:3 or aten::embedding at train.py:9:" in message(table, "")


def test_a_matrix_has_another_way_out() -> None:
    error = OperationFailed(ValueError("it is singular."), "aten.linalg_inv_ex", 0, 1, "float32[2, 2] from 0 to 0")
    error.__cause__ = LinAlgError("it is singular.")
    failure = KernelFailures([]).failure(plan_pb2.Run(), 1, error)
    assert "it is singular. Its operands are float32[2, 2] from 0 to 0: keep the matrix away" in str(failure)


def test_an_operation_without_a_source_has_its_name() -> None:
    assert message(KernelTable(), "a").startswith(f"step 6, {EMBEDDING}: too large")


def test_refused_memory_is_no_error_of_the_data() -> None:
    error = OperationFailed(OSError(errno.ENOMEM, "no memory"), EMBEDDING, 0, 1, "")
    error.__cause__ = OSError(errno.ENOMEM, "no memory")
    assert KernelFailures([]).failure(plan_pb2.Run(), 1, error) is error


@pytest.mark.parametrize("layer", ["a", "b"])
def test_a_kernel_without_operations_that_fail_has_no_entry(layer: str) -> None:
    table = KernelTable()
    table.number("text", layer)
    assert table.sources() == []
