"""The rules of image models: random programs hit each of them, and a broken one is noticed."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mutations import first_dimension, mutate_results, never_decomposed, noticed, uncounted
from random_images import IMAGE_OPERATIONS
from random_programs import traced_program

from appliance.compiler.core.errors import CompileError
from appliance.compiler.sharding.rules.rule import RULES, Outcome, Query, R, sharded

pytestmark = pytest.mark.parity

# The rules that must have divided an operation in a program that then gave what plain torch gives.
_REACHED = """
    convolution convolution_backward max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d
    avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d
    adaptive_max_pool2d_backward upsample_nearest1d upsample_nearest1d_backward upsample_linear1d
    upsample_linear1d_backward upsample_bilinear2d upsample_bilinear2d_backward replication_pad1d
    replication_pad1d_backward im2col col2im constant_pad_nd roll slice_scatter native_group_norm
    native_group_norm_backward _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    native_batch_norm_backward embedding embedding_dense_backward index.Tensor index_put max.dim logsumexp
"""
REACHED = {f"aten.{name}" for name in _REACHED.split()}


def counting(found: Counter[str], name: str, rule: Callable[[Query], Outcome]) -> Callable[[Query], Outcome]:
    """The rule, which counts where it divided an operation, or had it decomposed."""

    def counted(query: Query) -> Outcome:
        if query.num_parts > 1 and query.sharded:
            found[name] += 1
        return rule(query)

    return counted


@pytest.mark.timeout(600)  # it compiles many programs
def test_random_image_programs_are_right_or_refused() -> None:
    found: Counter[str] = Counter()
    hits: Counter[str] = Counter()

    @seed(0)
    @settings(max_examples=70, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 1 << 20))
    def run(number: int) -> None:
        traced, batch = traced_program(number, list(IMAGE_OPERATIONS))
        traced.check([batch], [(1, 1)], seeds=[0])
        of_program: Counter[str] = Counter()
        counted = {name: counting(of_program, name, rule) for name, rule in RULES.items()}
        try:
            with mock.patch.dict(RULES, counted):
                traced.check([batch], [(2 + number % 2, 1)], seeds=[number % 5])
            found["equal"] += 1
            hits.update(of_program)
        except CompileError:
            found["refused"] += 1

    run()
    assert found["equal"] > 30, found
    assert hits.keys() >= REACHED, sorted(REACHED - hits.keys())


def undivided(rule: Any) -> Any:
    """The sizes that the operation is told stay those of the whole batch."""
    return lambda query: Outcome(operands=(outcome := rule(query)).operands, results=outcome.results)


def passes_through(rule: Any) -> Any:
    """Whatever dimension is cut."""

    def mutant(query: Query) -> Outcome:
        cut = query.sharded[0] if query.sharded else R
        return Outcome(operands=[cut] * len(query.operands), results=[cut] * len(query.op.results))

    return mutant


def local_statistics(count: int) -> Callable[[Any], Any]:
    def needs(query: Query) -> list[Any]:
        return [placement if placement.is_sharded else R for placement in query.placements]

    return lambda rule: never_decomposed(rule, needs, sharded(0), *[R] * (count - 1))


# operations, what is done to their rules, the operations of the programs that should notice
MUTATIONS: dict[str, tuple[str, Callable[[Any], Any], tuple[str, ...]]] = {
    "unreduced-kernels": ("aten.convolution_backward", mutate_results(uncounted), ("convolution", "tanh")),
    "unreduced-group-weights": ("aten.native_group_norm_backward", mutate_results(uncounted), ("group-norm", "tanh")),
    "whole-batch-in-group-norm": ("aten.native_group_norm", undivided, ("group-norm", "tanh")),
    "whole-batch-in-resizing": ("aten.upsample_nearest1d_backward", undivided, ("nearest", "tanh")),
    "statistics-of-parts": (
        "aten._native_batch_norm_legit_functional",
        local_statistics(5),
        ("batch-norm", "tanh"),
    ),
    "statistics-of-parts-backward": ("aten.native_batch_norm_backward", local_statistics(3), ("batch-norm", "tanh")),
    "unreduced-frozen-weights": ("aten.native_batch_norm_backward", mutate_results(uncounted), ("frozen-norm", "tanh")),
    "pooling-of-samples": (
        "aten.max_pool2d_with_indices aten.max_pool2d_with_indices_backward",
        passes_through,
        ("max-pool", "transpose"),
    ),
    "padding-of-samples": ("aten.constant_pad_nd", passes_through, ("pad", "tanh")),
    "rolled-samples": ("aten.roll", passes_through, ("roll", "tanh", "cumsum")),
    "maximum-of-samples": ("aten.max.dim", passes_through, ("maximum-of", "tanh")),
    "picked-samples-stay": ("aten.index.Tensor", mutate_results(first_dimension), ("two-indices", "transpose")),
    "replaced-samples": ("aten.slice_scatter", passes_through, ("overwritten", "transpose")),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    broken, change, operations = MUTATIONS[name]
    with mock.patch.dict(RULES, {operation: change(RULES[operation]) for operation in broken.split()}):
        assert noticed(operations)
