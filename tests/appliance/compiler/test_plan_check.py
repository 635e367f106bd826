"""Plans that do not hold together are refused: each field is changed, each part left out, and that is noticed."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled_steps import Traced, simulate
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from reported_steps import NARROW, ROWS, trained_blocks
from torch import nn

from appliance.compiler.core.target import ExecutionStrategy, Half, Precision
from appliance.compiler.plan_check.check import PlanError, check_plan
from wsc.v1 import plan_pb2

# Nothing in a plan contradicts another value of these. That they are the compiler's is said by the artifact's hash.
MEANING = {
    "WaferPlan.memory_bytes": "told in reports",
    "WaferPlan.own_bytes": "told in reports; how much memory is kept",
    "MemoryXPlan.own_bytes": "told in reports",
    "SwarmXPlan.own_bytes": "told in reports",
    "WaferPlan.flops": "told in reports; how many threads are worth waking",
    "WaferPlan.kernel_library": "one library or the other: both give the same",
    "WaferPlan.recomputes": "told in reports",
    "WaferPlan.kept_every": "told in reports",
    "WaferPlan.kept_at_most": "told in reports",
    "WaferPlan.row_slices": "told in reports",
    "Run.layer": "told in reports and messages",
    "StateSlot.name": "a state by another name is another state; the client finds none of that name",
    "Output.name": "as of states",
    "WorkerPlan.input_names": "as of states",
    "Group.reduction": "a sum can be a maximum: both have the same types",
    "Plan.format": "compared when a plan is loaded",
    **{f"KernelSources.{name}": "told in messages" for name in ("kernel", "layer")},
    **{f"Operation.{name}": "of sources, told in messages" for name in ("name", "source")},
    **{f"Precision.{name}": "told in reports" for name in ("half", "optimization_level", "half_gradients")},
}
OF_PIPELINES = {
    **MEANING,
    "PipelinePlan.memory_bytes": "told in reports",
    "PipelinePlan.own_bytes": "told in reports; how much memory is kept",
    "PipelinePlan.flops": "told in reports",
    "PipelinePlan.kernel_library": "one library or the other: both give the same",
    "JoinedValue.reduction": "as of groups",
    "Region.name": "told in reports",
    **{f"Region.{name}": "where it is drawn" for name in ("x", "y", "width", "height")},
    "Run.micro_batch": "of what is not joined, told in reports",
    "Plan.num_shards": "no shard takes part",
    "StateSlot.replicated": "there is one copy",
}
HALVES = Precision(half=Half.BFLOAT16, half_gradients=True)
SPREAD = 5  # places at which a field is changed


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trained_blocks()


def fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor, int | None]]:
    """Every scalar of a message and of all within it: (owner, field, index or None)."""
    for field, value in message.ListFields():
        values = list(value) if field.is_repeated else [value]
        for index, item in enumerate(values):
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                yield from fields(item)
            else:
                yield message, field, index if field.is_repeated else None


def unset(message: Message) -> Iterator[tuple[Message, Any, None]]:
    """Scalars that have their default, which ListFields leaves out."""
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            held = getattr(message, field.name)
            within = list(held) if field.is_repeated else [held] if message.HasField(field.name) else []
            for item in within:
                yield from unset(item)
        elif not field.is_repeated and getattr(message, field.name) == field.default_value:
            yield message, field, None


def changes(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 0] if value else [1]
    assert isinstance(value, str)
    return [value + "x", ""]


def mutations(plan: plan_pb2.Plan) -> Iterator[tuple[str, str, Callable[[], None], Callable[[], None]]]:
    """(field, what is changed, change, change back), each field in a few places."""
    places: dict[str, list[tuple[Message, FieldDescriptor, int | None]]] = {}
    for place in [*fields(plan), *unset(plan)]:
        places.setdefault(f"{place[0].DESCRIPTOR.name}.{place[1].name}", []).append(place)
    for name, found in places.items():
        for owner, field, index in found[:: max(1, len(found) // SPREAD)]:
            is_absent = index is None and field.has_presence and not owner.HasField(field.name)
            before = getattr(owner, field.name) if index is None else getattr(owner, field.name)[index]
            for after in changes(before):
                if after == before:
                    continue

                def put(value: Any, owner: Message = owner, field: Any = field, index: int | None = index) -> None:
                    if index is None:
                        setattr(owner, field.name, value)
                    else:
                        getattr(owner, field.name)[index] = value

                def put_back(value: Any = before, owner: Message = owner, name: str = field.name) -> None:
                    if is_absent:  # noqa: B023
                        owner.ClearField(name)
                    else:
                        put(value)

                yield name, f"{name} {before!r} -> {after!r}", lambda: put(after), put_back  # noqa: B023


def pipelined(traced: Traced) -> plan_pb2.Plan:
    return traced.plan(1, micro_batches=2, wafer_cores=3, execution_strategy=ExecutionStrategy.PIPELINE)


@pytest.mark.parametrize(
    ("wafers", "shards", "micro_batches", "precision"),
    [(1, 1, 1, None), (2, 2, 1, None), (2, 1, 2, None), (2, 1, 2, HALVES), (0, 0, 2, None)],
    ids=["1-1-1", "2-2-1", "2-1-2", "half-gradients", "pipelined"],
)
def test_every_changed_field_is_noticed(
    traced: Traced, wafers: int, shards: int, micro_batches: int, precision: Precision | None
) -> None:
    plan = (
        traced.plan(wafers, shards, micro_batches=micro_batches, precision=precision) if wafers else pipelined(traced)
    )
    meaning = MEANING if wafers else OF_PIPELINES
    check_plan(plan)
    whole = plan.SerializeToString(deterministic=True)
    missed = []
    seen = set()
    for name, what, change, back in mutations(plan):
        seen.add(name)
        try:
            change()
        except ValueError:
            continue  # no enum has it, or no message can carry it
        try:
            check_plan(plan)
        except PlanError:
            pass
        else:
            if name not in meaning:
                missed.append(what)
        back()
    assert plan.SerializeToString(deterministic=True) == whole
    assert not missed, missed
    assert seen >= {"Run.inputs", "Run.outputs", "Run.commits", "Run.drops", "GroupMember.offset", "Kernel.cirh"}


def pieces(plan: plan_pb2.Plan) -> Iterator[tuple[Any, int]]:
    """Every item of every list of messages."""

    def within(message: Message) -> Iterator[tuple[Any, int]]:
        for field, value in message.ListFields():
            if field.type != FieldDescriptor.TYPE_MESSAGE:
                continue
            items = value if field.is_repeated else [value]
            for index, item in enumerate(items):
                if field.is_repeated:
                    yield value, index
                yield from within(item)

    yield from within(plan)


@pytest.mark.parametrize("mode", ["streamed", "half-gradients", "pipelined"])
def test_what_is_missing_or_there_twice_is_noticed_or_changes_nothing(traced: Traced, mode: str) -> None:
    match mode:
        case "streamed":
            plan = traced.plan(2, 2)
        case "half-gradients":
            plan = traced.plan(2, 2, micro_batches=2, precision=HALVES)
        case _:
            plan = pipelined(traced)
    batches = [[torch.randn(ROWS, NARROW)] for _ in range(2)]
    expected = simulate(plan, traced.initial).run(batches)
    places = list(pieces(plan))
    for number in range(0, len(places), 2):
        for twice in (False, True):
            changed = copy.deepcopy(plan)
            owner, index = list(pieces(changed))[number]
            if twice:
                owner.insert(index, copy.deepcopy(owner[index]))
            else:
                del owner[index]
            try:
                check_plan(changed)
            except PlanError:
                continue
            if not changed.coordinator.outputs:
                continue  # the client would miss it
            results = simulate(changed, traced.initial).run(batches)
            for result, wanted in zip(results, expected, strict=True):
                assert all(torch.equal(result[name], wanted[name]) for name in wanted), (number, twice)


def test_kernels_that_are_not_valid() -> None:
    model = nn.Linear(2, 2)
    traced = Traced(lambda m: lambda x: m(x).sum().detach(), model, torch.randn(ROWS, 2), double=False)
    for text in ("", "module {", "module { func @graph() -> () { Return () } }", "x" * 100):
        plan = traced.plan(1)
        plan.wafer.kernels[0].cirh = text
        with pytest.raises(PlanError):
            check_plan(plan)
    plan = traced.plan(1)
    plan.wafer.kernels[0].cirh = plan.wafer.kernels[0].cirh.replace("aten.addmm", "aten.nothing")
    with pytest.raises(PlanError):
        check_plan(plan)


def test_gathered_outputs_and_plans_without_training_hold_together() -> None:
    model = nn.Linear(2, 2)
    batch = torch.randn(ROWS, 2)
    for step in (lambda m: lambda x: m(x).detach(), lambda m: lambda x: x.detach() * 2):
        traced = Traced(step, model, batch, double=False)
        for cluster in ((1, 1), (2, 1), (3, 2)):
            check_plan(traced.plan(*cluster))
    plan = Traced(lambda m: lambda x: m(x).detach(), model, batch, double=False).plan(2)
    (output,) = plan.coordinator.outputs
    assert output.gathered
    for name, value in (("dim", 1), ("dim", 9), ("outer", 0), ("outer", 5), ("gathered", False), ("value", 1)):
        changed = copy.deepcopy(plan)
        setattr(changed.coordinator.outputs[0], name, value)
        with pytest.raises(PlanError):
            check_plan(changed)
