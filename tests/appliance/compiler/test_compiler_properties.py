"""The sharding rules: random programs are right on any number of wafers, and a rule that is broken is noticed."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from compiled_steps import Traced, one_at_a_time
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st
from mutations import (
    all_cut,
    as_sum,
    first_dimension,
    mutate_results,
    never_decomposed,
    noticed,
    one_block,
    uncounted,
)
from random_programs import traced_program
from simulated_links import Deadlock, Hazard
from torch import nn

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import ExecutionStrategy
from appliance.compiler.partition import layers
from appliance.compiler.sharding.rules import pointwise as rules_pointwise
from appliance.compiler.sharding.rules.rule import RULES, SUM, Outcome, Query, R, sharded
from cstorch.errors import CompileError as LoweringError
from waferbox.cirh.table.lookup import ANNOTATIONS, names, spec

pytestmark = pytest.mark.parity

# Other operations stand for these when the passes are done.
REPLACED = {
    *ANNOTATIONS,
    *("cirh.LayerNorm", "cirh.FusedBatchNorm", "cirh.GroupNorm"),
    *("cirh.LayerNormGrad", "cirh.FusedBatchNormGrad", "cirh.GroupNormGrad"),
    *("cirh.Slice", "cirh.StridedSlice", "cirh.StridedSliceGrad"),
}
# On more than one wafer, the operands of these are gathered if they are cut.
WITHOUT_A_RULE = {
    "cirh.Arange",
    "aten.addmv",
    "aten.arange.start_step",
    "aten.argmax",
    "aten.argmin",
    "aten.cat",
    "aten.eye",
    "aten.gather_backward",
    "aten.index_reduce",
    "aten.kthvalue",
    "aten.split.Tensor",
    "aten.split_with_sizes",
}


def test_every_operation_has_a_rule_or_is_known_to_have_none() -> None:
    assert {name for name in names() if name not in RULES and not spec(name).pointwise} == WITHOUT_A_RULE | REPLACED
    assert RULES.keys() <= set(names())


def lowered(number: int) -> tuple[Traced, Any]:
    """A random program that has a lowering, which fewer than one in ten lack."""
    try:
        return traced_program(number)
    except LoweringError:
        reject()


def random_programs(*more: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Runs a test with 40 random programs, always the same."""

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        drawn = given(st.integers(0, 1 << 20), *more)(test)
        return seed(0)(settings(max_examples=40, database=None, suppress_health_check=list(HealthCheck))(drawn))

    return decorate


@random_programs(st.sampled_from([1, 2]))
def test_what_compiles_for_one_wafer_compiles_for_two_and_three(number: int, micro_batches: int) -> None:
    traced, batch = lowered(number)
    traced.check([batch], [(1, 1)], seeds=[0])
    shards = 1 + number % 2
    traced.check([batch], [(2, shards), (3, shards)], seeds=[number % 5], micro_batches=micro_batches)


@random_programs(st.sampled_from([(1, 1), (4, 1), (2, 2), (1, 3), (3, 2)]), st.sampled_from([1, 2, 3, 5]))
def test_random_programs_on_a_pipelined_wafer(number: int, parts: tuple[int, int], cores: int) -> None:
    micro_batches, num_replicas = parts
    traced, batch = lowered(number)
    traced.check(
        [batch],
        [(1, 1)],
        seeds=[number % 5],
        micro_batches=micro_batches,
        num_replicas=num_replicas,
        wafer_cores=cores,
        execution_strategy=ExecutionStrategy.PIPELINE,
    )


ORDERS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "all at once": contextlib.nullcontext,
    "in rounds": one_at_a_time,
    "in rounds that MemoryX adds": functools.partial(one_at_a_time, adds_in_memoryx=True),
    "in rounds, with layers run again": functools.partial(one_at_a_time, adds_in_memoryx=True, kept_every=(4, 2)),
}


@random_programs(
    st.sampled_from([(1, 2), (1, 3), (2, 2), (2, 3), (3, 4)]), st.sampled_from(list(ORDERS)), st.booleans()
)
def test_random_programs_in_micro_batches(number: int, cut: tuple[int, int], order: str, recomputes: bool) -> None:
    wafers, micro_batches = cut
    traced, batch = lowered(number)
    settings: dict[str, Any] = {"micro_batches": micro_batches, "recomputes": recomputes}
    with ORDERS[order]():
        traced.check([batch], [(wafers, 1 + number % 2)], seeds=[number % 5], **settings)


# -- mutations


# operation, what is done to its rule, the operations of the programs that should notice
MUTATIONS: dict[str, tuple[str, Callable[[Any], Any], tuple[str, ...]]] = {
    "mean-of-parts": (
        "aten.mean.dim",
        lambda rule: never_decomposed(rule, lambda query: list(query.placements), SUM),
        ("mean", "center"),
    ),
    "norm-of-parts": (
        "aten.linalg_vector_norm",
        lambda rule: never_decomposed(rule, lambda query: list(query.placements), SUM),
        ("norm", "norm-of-rows"),
    ),
    "variance-of-parts": (
        "aten.var.correction",
        lambda rule: never_decomposed(rule, lambda query: list(query.placements), SUM),
        ("var", "tanh"),
    ),
    "loss-of-parts": ("aten.mse_loss", lambda rule: never_decomposed(rule, all_cut, SUM), ("mse", "tanh")),
    "loss-gradient-of-parts": (
        "aten.mse_loss_backward",
        lambda rule: never_decomposed(rule, lambda q: [p if p.is_sharded else R for p in q.placements], sharded(0)),
        ("mse", "tanh"),
    ),
    "cross-entropy-of-parts": (
        "aten.nll_loss_forward",
        lambda rule: never_decomposed(rule, lambda q: [q.sharded[0]] * 2 + [R] * (len(q.operands) - 2), SUM, SUM),
        ("cross-entropy", "linear", "sum"),
    ),
    "maximum-added": ("cirh.Reduce", mutate_results(as_sum), ("amax", "amin", "tanh")),
    "unreduced-embedding": ("aten.embedding_dense_backward", mutate_results(uncounted), ("embedding", "tanh")),
    "unreduced-norm-weights": ("aten.native_layer_norm_backward", mutate_results(uncounted), ("layer-norm", "tanh")),
    "unreduced-product": ("cirh.MatMul", mutate_results(uncounted), ("linear", "sum", "gram")),
    "blocks-forgotten-by-concat": ("cirh.Concat", mutate_results(one_block), ("cat-over-samples", "tanh")),
    "blocks-forgotten-by-reshape": (
        "cirh.Reshape",
        mutate_results(one_block),
        ("transpose", "merge", "divide", "tanh"),
    ),
    "reshape-to-the-front": ("cirh.Reshape", mutate_results(first_dimension), ("transpose", "merge", "divide", "tanh")),
    "transpose-stays": ("cirh.Transpose", mutate_results(first_dimension), ("transpose", "tanh", "cumsum")),
    "broadcast-stays": ("cirh.BroadcastInDim", mutate_results(first_dimension), ("expand", "tanh", "cumsum")),
    "softmax-along-samples": (
        "cirh.Softmax",
        lambda rule: lambda q: Outcome(operands=q.placements, results=[q.placements[0]]),
        ("softmax", "tanh"),
    ),
    "running-sum-along-samples": (
        "aten.cumsum",
        lambda rule: lambda q: Outcome(operands=q.placements, results=[q.placements[0]]),
        ("cumsum", "tanh"),
    ),
    "attention-over-tokens": (
        "cirh.Attention",
        lambda rule: lambda q: Outcome(operands=q.placements, results=[q.placements[0]] * 2),
        ("attention", "transpose"),
    ),
    "attention-of-other-heads": ("cirh.AttentionGrad", mutate_results(first_dimension), ("attention", "tanh")),
    "elements-of-the-first-samples": (
        "aten.index.Tensor",
        lambda rule: never_decomposed(rule, lambda query: list(query.placements), sharded(0)),
        ("own-elements", "tanh"),
    ),
    "index-put-unreduced": ("aten.index_put", mutate_results(uncounted), ("rows", "tanh")),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    operation, change, operations = MUTATIONS[name]
    with mock.patch.dict(RULES, {operation: change(RULES[operation])}):
        assert noticed(operations)


def test_a_number_that_is_added_on_each_wafer_is_noticed() -> None:
    def passes(query: Query) -> bool:
        return query.op.name in ("cirh.Add", "cirh.Sub")

    with mock.patch.object(rules_pointwise, "_passes_sum", passes):
        assert noticed(("sum-over-samples", "plus-one", "twice"))


def test_a_product_of_partial_sums_is_noticed() -> None:
    with mock.patch.object(rules_pointwise, "_passes_sum", lambda query: bool(query.op.name == "cirh.Mul")):
        assert noticed(("sum-over-samples", "square"))


# -- mutations of the schedule

WIDE = 80  # more than INLINE_BYTES in a square matrix of float64


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.register_buffer("table", torch.zeros(WIDE, WIDE))


def wide(build: Callable[[Any], Any]) -> Callable[[], object]:
    torch.manual_seed(0)
    batches = [torch.randn(12, WIDE, dtype=torch.float64) for _ in range(4)]
    traced = Traced(build, Wide(), batches[0])
    return lambda: traced.check(batches, [(2, 2)], seeds=range(6))


def products(model: Any) -> Any:
    """A shard that the wafers read nothing of gets a large reduction."""

    def step(x: torch.Tensor) -> Any:
        model.table.copy_(x.t() @ x * 0.5)
        return model.table.sum() * 0 + x.sum()

    return step


def decay(model: Any) -> Any:
    """A weight that is read by the wafers, and changes without them."""

    def step(x: torch.Tensor) -> Any:
        result = model.last(model.first(x)).sum().detach()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        return result

    return step


def late(model: Any) -> Any:
    """A weight that is made of a reduced value."""

    def step(x: torch.Tensor) -> Any:
        mean = x.mean(0) * model.first.bias
        return (x @ model.first.weight).sum().detach() + ((x - mean) @ model.last.weight).sum().detach()

    return step


def test_a_buffer_that_is_written_before_its_readers_are_done_is_noticed() -> None:
    run = wide(products)
    run()
    with (
        mock.patch("appliance.compiler.wafer_schedule.schedule.unacknowledged_shards", return_value=[]),
        pytest.raises(Hazard),
    ):
        run()


def test_a_weight_that_is_overwritten_while_it_is_read_is_noticed() -> None:
    run = wide(decay)
    run()
    with mock.patch("appliance.compiler.wafer_schedule.schedule.ensure_releases"), pytest.raises(CompileError):
        run()
    with (
        mock.patch("appliance.compiler.memoryx_schedule.commits.Commits._is_released", return_value=True),
        pytest.raises(Hazard),
    ):
        run()


def test_a_wait_that_is_forgotten_is_noticed() -> None:
    run = wide(late)
    run()
    with (
        mock.patch.object(layers.Waits, "awaited", return_value=frozenset()),
        pytest.raises((Deadlock, CompileError)),
    ):
        run()
