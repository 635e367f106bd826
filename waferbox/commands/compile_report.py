"""`waferbox compile-report`: the report of a compile, made again from its plan."""

from pathlib import Path

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from appliance.compiler.artifacts import read_plan
from appliance.compiler.cost.machine_model import machine_model
from appliance.compiler.pipelined.memory import PipelineMemory
from appliance.compiler.report.builder import make_report
from appliance.compiler.report.report import Report
from appliance.drawing.number_text import bytes_text, count_text, seconds_text
from waferbox.host.folders import cache_root
from waferbox.output.tables import empty_table


class NoArtifact(ValueError):
    """Raised when a plan cannot be read."""


def read_report(plan: Path) -> Report:
    """Makes the report of a plan. Raises NoArtifact: it is damaged or of another version."""
    read = read_plan(plan)
    if read is None:
        raise NoArtifact(f"{plan} is damaged or of another version; compile the step again")
    return make_report(read, plan.stem, machine_model(cache_root()))


def report_tables(report: Report) -> Group:
    """The report for a terminal: a table of the layers, then lines about kernels, memory and the step."""
    totals = report.totals
    libraries = sorted({layer.library for layer in report.layers})
    numbers = ("parameters", "FLOPs", "streamed", "gradients", "activations", "forward", "backward")
    columns = ("layer", *numbers, *(["kernel"] if len(libraries) > 1 else []))
    layers = empty_table(*columns, right=numbers, whole=numbers, dense=True)
    for layer in report.layers:
        layers.add_row(
            escape(layer.layer),
            count_text(layer.parameters),
            count_text(layer.flops),
            bytes_text(layer.streamed_bytes),
            bytes_text(layer.gradient_bytes),
            bytes_text(layer.activation_bytes),
            seconds_text(layer.forward_seconds),
            seconds_text(layer.backward_seconds),
            *([layer.library] if len(libraries) > 1 else []),
        )
    layers.add_section()
    layers.add_row(
        "[bold]total",
        count_text(totals.parameters),
        count_text(totals.flops),
        bytes_text(totals.streamed_bytes),
        bytes_text(totals.gradient_bytes),
        "",
        seconds_text(sum(layer.forward_seconds for layer in report.layers)),
        seconds_text(sum(layer.backward_seconds for layer in report.layers)),
    )
    lines = (
        f"Kernels of the layers: {', '.join(libraries)}.",
        *(["Gradients of weights travel in half."] if report.half_gradients else []),
        *_memory_lines(report),
        *([warning] if (warning := report.gathering.warning()) else []),
        f"A step of {report.batch_rows} rows on {report.num_csx} wafer(s) is predicted to take "
        f"{seconds_text(totals.step_seconds)} ({report.machine.source}).",
    )
    return Group(layers, Text(), *(Text(line) for line in lines))


def _memory_lines(report: Report) -> list[str]:
    """The lines about the memory of wafers and MemoryX."""
    memory = report.memory
    if isinstance(memory, PipelineMemory):
        shares = zip(report.regions, memory.regions, strict=True)
        return [
            f"The wafer holds at most {bytes_text(memory.needed_bytes)} of {bytes_text(memory.capacity_bytes)}, "
            f"in {len(memory.regions)} region(s), each with the weights and the optimizer state of its layers:",
            *(
                f"  {region.name}: {bytes_text(held.total_bytes)}, busy {seconds_text(region.busy_seconds)}, "
                f"idle {seconds_text(region.idle_seconds)}"
                for region, held in shares
            ),
        ]
    weights = sum(shard.weight_bytes for shard in report.shards)
    other = sum(shard.other_bytes for shard in report.shards)
    return [
        f"A wafer holds at most {bytes_text(memory.peak.total_bytes)} of {bytes_text(memory.capacity_bytes)}, "
        f"in {memory.peak.segment}.",
        f"MemoryX holds {bytes_text(weights)} of weights and {bytes_text(other)} of other state "
        f"on {report.num_shards} shard(s).",
    ]
