"""The report: numbers that can be computed by hand, memory, the predicted step, and what is refused."""

import dataclasses
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_steps import Traced
from reported_steps import MACHINE, NARROW, ROWS, WIDE, Blocks, memory_of, trained_blocks
from torch.nn import functional

from appliance.compiler.core.errors import CompileError
from appliance.compiler.cost.machine_model import FILE, machine_model
from appliance.compiler.report.builder import make_report
from appliance.compiler.report.page import report_page
from appliance.compiler.report.report import Report
from appliance.compiler.report.timeline import GRADIENTS, WAFER, WEIGHTS, ScheduleStuck, simulate
from appliance.compiler.wafer_schedule.memory_plan import check_memory
from wsc.v1 import plan_pb2


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trained_blocks()


def report(traced: Traced, wafers: int = 1, shards: int = 1, **settings: Any) -> Report:
    return make_report(traced.plan(wafers, shards, **settings), "key", MACHINE)


@pytest.mark.parametrize(("wafers", "shards"), [(1, 1), (2, 2), (3, 1)])
def test_layers_by_hand(traced: Traced, wafers: int, shards: int) -> None:
    told = report(traced, wafers, shards)
    layers = {layer.layer: layer for layer in told.layers}
    assert list(layers) == ["first", "h.0", "h.1", "h.2", "up", "down"]
    products = {"first": 2, "h.0": 3, "up": 3, "down": 3}  # the batch needs no gradient
    sizes = {"first": (NARROW, NARROW), "h.0": (NARROW, NARROW), "up": (NARROW, WIDE), "down": (WIDE, 3)}
    for name, (inputs, outputs) in sizes.items():
        layer = layers[name]
        assert layer.parameters == inputs * outputs + outputs
        exact = products[name] * 2 * ROWS * inputs * outputs
        assert exact <= layer.flops <= exact + 20 * ROWS * max(inputs, outputs) + 10 * ROWS
        # Members of a group begin at multiples of 64 bytes.
        assert 4 * layer.parameters <= layer.gradient_bytes <= 4 * layer.parameters + 3 * 64
    assert layers["h.0"].kernels == 2
    assert told.totals.parameters == sum(p.numel() for p in Blocks().parameters())
    assert told.totals.flops == sum(layer.flops for layer in told.layers)
    assert sum(shard.weight_bytes for shard in told.shards) == 4 * told.totals.parameters
    assert sum(shard.other_bytes for shard in told.shards) == 4 * told.totals.parameters  # momentum
    assert sum(update.elements for shard in told.shards for update in shard.updates) == 2 * told.totals.parameters


def test_larger_layers_are_predicted_to_take_longer(traced: Traced) -> None:
    seconds = {layer.layer: layer.forward_seconds + layer.backward_seconds for layer in report(traced).layers}
    assert seconds["h.1"] < seconds["down"] < seconds["up"]
    assert seconds["h.0"] == pytest.approx(seconds["h.1"]) == pytest.approx(seconds["h.2"])
    faster = dataclasses.replace(MACHINE, float32_flops_per_second=1e12, bytes_per_second=1e12)
    assert make_report(traced.plan(1), "key", faster).totals.step_seconds < report(traced).totals.step_seconds


def test_memory_by_hand() -> None:
    """One large layer, forward only: batch, weight and result are there at once."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 500, bias=False), torch.nn.Linear(500, 1, bias=False))
    batch = torch.randn(ROWS, 300, dtype=torch.float64)
    traced = Traced(lambda m: lambda x: m(x).sum().detach(), model, batch)
    memory = memory_of(report(traced))
    first, second = memory.points
    assert (first.segment, second.segment) == ("0", "1")
    assert first.batch_bytes == second.batch_bytes == ROWS * 300 * 8
    assert (first.weight_bytes, first.activation_bytes, first.working_bytes) == (300 * 500 * 8, 0, ROWS * 500 * 8)
    assert first.arriving_bytes == 500 * 8
    assert (second.weight_bytes, second.activation_bytes) == (500 * 8, ROWS * 500 * 8)
    assert second.arriving_bytes == 0
    assert memory.peak is first
    assert memory.capacity_bytes == 8 << 30


def test_a_step_without_work_for_the_wafers() -> None:
    batch = torch.randn(ROWS, 3)
    traced = Traced(lambda m: lambda x: m.bias.detach() * 2, torch.nn.Linear(3, 2), batch, double=False)
    told = report(traced)
    peak = memory_of(told).peak
    assert (peak.segment, peak.total_bytes) == ("idle", batch.nbytes)
    assert (told.layers, told.floor_plan.regions, told.timeline.wafer_busy_seconds) == ((), (), 0)
    assert "Compile report" in report_page(told)


def test_activations_grow_forward_and_shrink_backward(traced: Traced) -> None:
    points = {point.segment: point for point in memory_of(report(traced)).points}
    forward = [points[name].activation_bytes for name in ("h.0", "h.1", "h.2", "up")]
    assert all(before < after for before, after in pairwise(forward))
    backward = [points[f"{name} backward"].activation_bytes for name in ("up", "h.2", "h.1", "h.0")]
    assert all(before > after for before, after in pairwise(backward))
    # The buffers that gradients are sent from are there all the time.
    assert len({point.gradient_bytes for point in points.values()}) == 1
    assert points["h.1"].gradient_bytes >= 4 * sum(p.numel() for p in Blocks().parameters())


def test_a_refusal_says_what_would_fit(traced: Traced) -> None:
    # Weights that stay between the passes are no reason for a refusal.
    memory = memory_of(report(traced, drops_weights=True))
    peak = memory.peak
    tight = peak.total_bytes - peak.scaling_bytes // 3
    with pytest.raises(CompileError) as refused:
        traced.plan(1, wafer_memory_bytes=tight)
    message = str(refused.value)
    assert f"in segment {peak.segment}:" in message
    found = re.search(r"about (\d+) rows instead of 12 .*num_csx=(\d+)", message)
    assert found is not None
    rows, wafers = int(found[1]), int(found[2])
    assert (rows, wafers) == (8, 2)
    # What it says is so.
    check_memory(
        dataclasses.replace(memory_of(report(traced, wafers, drops_weights=True)), capacity_bytes=tight),
        wafers,
        ROWS,
        micro_batches=1,
    )
    traced.plan(wafers, wafer_memory_bytes=tight)
    traced.plan(1, wafer_memory_bytes=peak.total_bytes)
    with pytest.raises(CompileError, match=r'with 12 rows at once there is no room .*micro_batch_size = "auto"'):
        traced.plan(1, wafer_memory_bytes=1000)
    row = peak.weight_bytes + peak.gradient_bytes + 64
    with pytest.raises(CompileError, match=r"a single row .* needs .* gradients leave 64 B, so neither"):
        traced.plan(1, wafer_memory_bytes=row, micro_batches=ROWS)
    with pytest.raises(CompileError, match="leave no room for a single row"):
        traced.plan(1, wafer_memory_bytes=1000, micro_batches=ROWS)


@pytest.mark.parametrize(("wafers", "shards"), [(1, 1), (2, 1), (1, 2), (3, 3)])
def test_the_step_in_time(traced: Traced, wafers: int, shards: int) -> None:
    plan = traced.plan(wafers, shards)
    timeline = make_report(plan, "key", MACHINE).timeline
    tracks = {track: [s for s in timeline.spans if s.track == track] for track in {s.track for s in timeline.spans}}
    assert set(tracks) == {WAFER, WEIGHTS, GRADIENTS, *(f"memoryx-{shard}" for shard in range(shards))}
    for spans in (spans for track, spans in tracks.items() if track not in (WEIGHTS, GRADIENTS)):
        assert all(before.end <= after.begin for before, after in pairwise(spans))
    labels = [i.run.layer for i in plan.wafer.instructions if i.WhichOneof("kind") == "run"]
    assert [span.label for span in tracks[WAFER]] == labels
    last_update = max(s.end for track, spans in tracks.items() if track.startswith("memoryx") for s in spans)
    assert timeline.step_seconds == max(span.end for span in timeline.spans) >= last_update
    assert last_update > tracks[WAFER][-1].begin
    assert timeline.wafer_busy_seconds == pytest.approx(sum(s.end - s.begin for s in tracks[WAFER]))
    sent = sum(span.nbytes for span in tracks[WEIGHTS])
    passing = zip(plan.swarmx.groups, plan.swarmx.times, strict=True)
    assert sent == sum(group.nbytes * times for group, times in passing if group.kind == plan_pb2.GROUP_KIND_WEIGHTS)


def test_a_slow_stream_makes_the_wafer_wait(traced: Traced) -> None:
    slow = dataclasses.replace(MACHINE, stream_bytes_per_second=1e5)
    fast, waiting = report(traced).timeline, make_report(traced.plan(1), "key", slow).timeline
    assert waiting.wafer_busy_seconds == pytest.approx(fast.wafer_busy_seconds)
    streamed = sum(span.nbytes for span in waiting.spans if span.track == WEIGHTS)
    assert waiting.step_seconds > streamed / 1e5 > fast.step_seconds


def test_programs_that_wait_for_each_other_are_found(traced: Traced) -> None:
    plan = traced.plan(1)
    (sends,) = [[i for i in part.instructions if i.WhichOneof("kind") == "send"] for part in plan.memoryx]
    plan.memoryx[0].instructions.remove(sends[0])
    with pytest.raises(ScheduleStuck):
        simulate(plan, MACHINE, lambda run: 0.0, lambda shard, run: 0.0)


def test_the_kernel_of_attention_is_told_with_its_reason() -> None:
    def build(model: Any) -> Any:
        def step(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
            heads = model[0](x).view(ROWS, 4, 2, 3).transpose(1, 2)
            loss = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).square().sum()
            loss.backward()
            return loss.detach(), [parameter.grad for parameter in model.parameters()]

        return step

    traced = Traced(build, torch.nn.Sequential(torch.nn.Linear(24, 24)), torch.randn(ROWS, 24), double=False)
    (layer,) = report(traced).layers
    assert layer.library == "aten"
    assert "attention forward: fused, since in float32" in layer.reason
    assert "attention backward: fused" in layer.reason
    per_pair = 2 * ROWS * 2 * 3
    assert layer.flops > 7 * per_pair * (1 + 2 + 3 + 4) + 2 * 2 * ROWS * 24 * 24


def test_json_has_stable_names(traced: Traced) -> None:
    data = json.loads(report(traced, 2, 2).to_json())
    assert list(data) == [
        *("format", "artifact", "num_csx", "num_shards", "batch_rows", "micro_batches", "micro_batch_notes"),
        *("half_gradients", "machine", "totals", "layers", "memory", "role_memory", "shards", "floor_plan"),
        *("timeline", "regions", "gathering"),
    ]
    assert [role["role"] for role in data["role_memory"]] == ["wafer", "swarmx", "memoryx-0", "memoryx-1"]
    assert all(role["link_bytes"] > 0 for role in data["role_memory"])
    assert set(data["layers"][0]) == {
        *("layer", "parameters", "flops", "streamed_bytes", "gradient_bytes", "activation_bytes", "kernels", "library"),
        *("reason", "forward_seconds", "backward_seconds"),
    }
    assert (data["num_csx"], data["num_shards"], data["batch_rows"]) == (2, 2, ROWS)
    assert len(data["floor_plan"]["regions"]) == len(data["layers"])
    assert report(traced, 2, 2).to_json() == report(traced, 2, 2).to_json()


def test_rates_are_measured_once_and_damaged_ones_again(tmp_path: Path) -> None:
    first = machine_model(tmp_path)
    assert first.bytes_per_second > 1e6
    assert first.float32_flops_per_second > 1e6
    written = (tmp_path / FILE).read_bytes()
    assert machine_model(tmp_path) == first
    assert (tmp_path / FILE).read_bytes() == written
    for text in ("", "[]", "{}", written.decode().replace("measured on", "from"), '{"source": 1}'):
        (tmp_path / FILE).write_text(text)
        assert machine_model(tmp_path).source == first.source
