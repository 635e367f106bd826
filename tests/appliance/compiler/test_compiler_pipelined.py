"""Layer pipelined mode: the order of regions' work, what waits for what, what is refused, and what is told."""

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from compiled_steps import Traced
from pipeline_simulator import PipelineSimulation
from reported_steps import MACHINE, NARROW, ROWS, trained_blocks
from rich.console import Console
from simulated_links import Hazard
from torch import nn

from appliance.compiler.artifacts import REPORT_DATA
from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import ExecutionStrategy, MicroBatching, Target
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.pipeline import compile_module
from appliance.compiler.pipelined import plan as pipelined_plan
from appliance.compiler.pipelined.memory import PipelineMemory
from appliance.compiler.pipelined.program import _Program
from appliance.compiler.plan_check.check import PlanError, check_plan
from appliance.compiler.report.builder import make_report
from appliance.compiler.report.page import report_page
from appliance.compiler.report.report import micro_batch_notes, micro_batch_warnings
from appliance.page.compile_report import read_report
from waferbox.commands.compile_report import report_tables
from wsc.v1 import plan_pb2

PIPELINE = ExecutionStrategy.PIPELINE
SLOW_LAST = 2  # the seed with which the second of two regions goes on only when the first cannot


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trained_blocks()


def plan_of(traced: Traced, micro_batches: int, cores: int, **settings: Any) -> plan_pb2.Plan:
    return traced.plan(1, micro_batches=micro_batches, wafer_cores=cores, execution_strategy=PIPELINE, **settings)


def passes(region: plan_pb2.Region) -> str:
    """F and B for each micro-batch's pass through a region, in order."""
    found: list[tuple[str, int]] = []
    for instruction in region.instructions:
        run = instruction.run
        if run.outputs and not run.layer.endswith("update") and run.layer != "input":
            each = ("B" if run.layer.endswith("backward") else "F", run.micro_batch)
            if each not in found:
                found.append(each)
    return "".join(kind for kind, _ in found)


def test_a_region_alternates_forward_and_backward_when_as_many_micro_batches_are_in_flight_as_regions_follow(
    traced: Traced,
) -> None:
    plan = plan_of(traced, 6, 3)
    first, second, last = map(passes, plan.pipeline.regions)
    assert last == "FB" * 6
    for number, order in enumerate((first, second, last)):
        assert order.count("F") == order.count("B") == 6
        ahead = [order[:end].count("F") - order[:end].count("B") for end in range(len(order) + 1)]
        assert max(ahead) == 3 - number


def test_weights_state_and_updates_are_in_the_region_of_their_layer(traced: Traced) -> None:
    plan = plan_of(traced, 2, 3)
    names = {slot.value: slot.name for slot in plan.pipeline.states}
    found = []
    for region in plan.pipeline.regions:
        runs = [i.run for i in region.instructions if i.HasField("run")]
        committed = {names[state] for run in runs for state in run.commits if state}
        read = {names[v] for run in runs for v in run.inputs if v in names and not run.layer.endswith("update")}
        assert {name.replace("momentum", "model") for name in committed} == read
        found.append(committed)
    assert set.union(*found) == set(names.values())
    assert sum(map(len, found)) == len(names)


def test_without_a_backward_pass_micro_batches_follow_one_another() -> None:
    model = nn.Sequential(nn.Linear(NARROW, NARROW), nn.Tanh(), nn.Linear(NARROW, NARROW))
    batch = torch.randn(ROWS, NARROW, dtype=torch.float64)
    traced = Traced(lambda m: lambda x: m(x).detach(), model, batch)
    assert [passes(region) for region in plan_of(traced, 4, 2).pipeline.regions] == ["FFFF", "FFFF"]
    traced.check([batch], [(1, 1)], micro_batches=4, wafer_cores=2, execution_strategy=PIPELINE)


class Tied(nn.Module):
    """Two layers with one weight, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(NARROW, NARROW), nn.Linear(NARROW, NARROW)
        self.last.weight = self.first.weight


def decay(model: Any) -> Callable[[Any], Any]:
    """The weight is replaced without anything that depends on its readers."""

    def step(x: torch.Tensor) -> Any:
        result = model.last(model.first(x).tanh()).sum().detach()
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        return result

    return step


def test_a_weight_is_replaced_when_all_regions_have_read_it() -> None:
    batches = [torch.randn(ROWS, NARROW, dtype=torch.float64) for _ in range(3)]
    traced = Traced(decay, Tied(), batches[0])
    settings: dict[str, Any] = {"micro_batches": 3, "wafer_cores": 2, "execution_strategy": PIPELINE}
    traced.check(batches, [(1, 1)], seeds=range(6), **settings)
    with mock.patch.object(_Program, "_unread", return_value=()):
        plan = compile_module(traced.text, Target(num_csx=1, num_shards=1, **settings))
    with pytest.raises(PlanError, match="before a region has read it"):
        check_plan(plan)
    with pytest.raises(Hazard):
        PipelineSimulation(plan, traced.initial).run([[batch] for batch in batches], SLOW_LAST)


def test_regions_that_would_wait_in_a_circle_are_noticed(traced: Traced) -> None:
    plan = plan_of(traced, 2, 2)
    region = plan.pipeline.regions[0].instructions
    places = [i for i, each in enumerate(region) if each.run.layer.endswith("backward")]
    changed = copy.deepcopy(plan)
    moved = changed.pipeline.regions[0].instructions
    backward = moved.pop(places[0])
    backward.run.ClearField("drops")
    moved.insert(1, backward)
    with pytest.raises(PlanError, match="waits for a value that is never made"):
        check_plan(changed)


def test_more_than_one_wafer_is_refused(traced: Traced) -> None:
    with pytest.raises(CompileError, match=r"num_csx=2; use num_csx=1, or use .*weight_streaming"):
        traced.plan(2, execution_strategy=PIPELINE)


def test_too_many_parameters_are_refused(traced: Traced) -> None:
    count = sum(parameter.numel() for parameter in traced.reference.parameters())
    with mock.patch.object(pipelined_plan, "MAX_PARAMETERS", count):
        plan_of(traced, 1, 1)
    with (
        mock.patch.object(pipelined_plan, "MAX_PARAMETERS", count - 1),
        pytest.raises(CompileError, match=rf"\({count}\).*weight_streaming"),
    ):
        plan_of(traced, 1, 1)


def test_what_does_not_fit_the_wafer_is_refused_with_figures_and_a_way_out(traced: Traced) -> None:
    with pytest.raises(CompileError) as error:
        plan_of(traced, 2, 2, wafer_memory_bytes=10_000)
    message = str(error.value)
    for part in ("9.77 KiB", "weights and optimizer state", "gradients", "weight_streaming", "wafer_memory_gi"):
        assert part in message
    needed = make_report(plan_of(traced, 2, 2), "", MACHINE).memory.needed_bytes
    plan_of(traced, 2, 2, wafer_memory_bytes=needed)
    with pytest.raises(CompileError):
        plan_of(traced, 2, 2, wafer_memory_bytes=needed - 1)


def chosen(traced: Traced, **settings: Any) -> plan_pb2.Plan:
    target = Target(num_csx=1, num_shards=1, execution_strategy=PIPELINE, **settings)
    plan = compile_in_micro_batches(traced.text, target, MicroBatching(), lambda: MACHINE)
    check_plan(plan)
    return plan


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def trained_deep(rows: int) -> Traced:
    def build(model: Any) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad * 0.1)
                    parameter.grad = None
            return loss.detach()

        return step

    return Traced(build, Deep(), torch.randn(rows, 128), double=False)


def test_micro_batches_are_as_many_as_are_predicted_to_be_the_fastest() -> None:
    small, large = trained_deep(12), trained_deep(12 * 1024)
    assert chosen(large, wafer_cores=1).worker.micro_batches == 1  # nothing to fill
    assert chosen(small, wafer_cores=4).worker.micro_batches == 1  # each operation takes longer to begin than to do
    assert chosen(large, wafer_cores=4).worker.micro_batches > 3
    (note,) = micro_batch_notes(chosen(large, wafer_cores=2))
    assert re.search(r"2 region\(s\).*12288 rows in \d+ micro-batch", note)


def test_micro_batches_are_made_smaller_until_they_fit() -> None:
    traced = trained_deep(12 * 1024)
    needed = make_report(plan_of(traced, 1, 1), "", MACHINE).memory.needed_bytes
    plan = chosen(traced, wafer_cores=1, wafer_memory_bytes=needed * 2 // 3)
    assert plan.worker.micro_batches > 1
    with pytest.raises(CompileError, match="weight_streaming"):
        chosen(traced, wafer_cores=1, wafer_memory_bytes=100_000)


def test_the_report_shows_the_regions_that_run(traced: Traced) -> None:
    plan = plan_of(traced, 3, 3)
    report = make_report(plan, "0123", MACHINE)
    regions = plan.pipeline.regions
    drawn = [(r.layer, r.x, r.y, r.width, r.height) for r in report.floor_plan.regions]
    assert drawn == [(r.name, r.x, r.y, r.width, r.height) for r in regions]
    assert {span.track for span in report.timeline.spans} == {f"region-{number}" for number in range(len(regions))}
    runs = [i.run for region in regions for i in region.instructions if i.run.outputs]
    assert len(report.timeline.spans) == len(runs)
    assert {span.micro_batch for span in report.timeline.spans} == {None, 0, 1, 2}
    for region in report.regions:
        assert region.busy_seconds + region.idle_seconds == pytest.approx(report.timeline.step_seconds)
    assert report.totals.parameters == sum(parameter.numel() for parameter in traced.reference.parameters())
    page = report_page(report)
    assert all(region.name in page for region in regions)
    assert "bubbles" in page
    assert "MemoryX" not in page
    terminal = Console(file=io.StringIO(), width=200)
    terminal.print(report_tables(report))
    assert isinstance(terminal.file, io.StringIO)
    assert all(f"{region.name}: " in terminal.file.getvalue() for region in regions)


def test_the_page_of_the_cluster_draws_the_regions(traced: Traced, tmp_path: Path) -> None:
    report = make_report(plan_of(traced, 2, 3), "0123", MACHINE)
    (tmp_path / REPORT_DATA).write_text(report.to_json())
    shown = read_report(str(tmp_path))
    assert shown is not None
    assert all(region.name in shown.drawing() for region in report.regions)


def test_replicas_lie_side_by_side_and_divide_the_updates(traced: Traced) -> None:
    plan = plan_of(traced, 3, 4, num_replicas=2)
    pipeline = plan.pipeline
    left, right = pipeline.regions[:2], pipeline.regions[2:]
    assert (pipeline.num_replicas, pipeline.micro_batches, len(right)) == (2, 6, 2)
    assert max(r.x + r.width for r in left) <= min(r.x for r in right)
    for half, parts in ((left, {0, 1, 2}), (right, {3, 4, 5})):
        runs = [i.run for region in half for i in region.instructions if i.run.outputs]
        assert {run.micro_batch for run in runs if not run.layer.endswith("update")} == parts
        assert any(run.commits for run in runs)
    batches = [torch.randn(ROWS, NARROW) for _ in range(2)]
    traced.check(
        batches,
        [(1, 1)],
        rtol=1e-5,
        seeds=range(5),
        micro_batches=3,
        num_replicas=2,
        wafer_cores=4,
        execution_strategy=PIPELINE,
    )
    assert "over 2 replicas" in micro_batch_notes(plan)[0]


def test_replicas_that_the_batch_or_the_mode_does_not_allow_are_refused(traced: Traced) -> None:
    with pytest.raises(CompileError, match=r"12 samples .* over num_replicas=5"):
        plan_of(traced, 1, 5, num_replicas=5)
    with pytest.raises(CompileError, match="strategy pipeline, or num_csx=2"):
        traced.plan(1, num_replicas=2)


def test_a_size_that_does_not_divide_the_rows_of_a_replica_is_replaced_by_the_next_below(traced: Traced) -> None:
    target = Target(num_csx=1, num_shards=1, num_replicas=2, execution_strategy=PIPELINE)
    plan = compile_in_micro_batches(traced.text, target, MicroBatching(size=4), lambda: MACHINE)
    assert (plan.pipeline.num_replicas, plan.pipeline.micro_batches) == (2, 4)
    (warning,) = micro_batch_warnings(plan)
    assert warning.endswith("it does not divide the 6 rows that a replica has; 3 rows are taken instead")


@pytest.mark.parametrize(("micro_batches", "cores"), [(1, 1), (4, 2), (6, 3), (12, 3)])
def test_no_order_of_regions_holds_more_than_is_planned(traced: Traced, micro_batches: int, cores: int) -> None:
    plan = plan_of(traced, micro_batches, cores)
    memory = make_report(plan, "", MACHINE).memory
    assert isinstance(memory, PipelineMemory)
    allowed = sum(region.activation_bytes + region.working_bytes for region in memory.regions)
    simulation = PipelineSimulation(plan, traced.initial)
    for seed in range(12):
        simulation.run([[torch.randn(ROWS, NARROW)]], seed)
    assert 0 < simulation.most_bytes <= allowed
