"""Makes the page of a report: one file of HTML with drawings in SVG, which needs no script, font or network.

Colours are classes, which the page defines for light and dark. Names come from the user's modules and are escaped.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from appliance import drawing
from appliance.compiler.partition.layers import BACKWARD
from appliance.compiler.pipelined.memory import PipelineMemory
from appliance.compiler.report.report import Report, RoleMemory
from appliance.compiler.report.timeline import GRADIENTS, WAFER, WEIGHTS, Span, Timeline
from appliance.compiler.wafer_schedule.memory_plan import MemoryPlan, MemoryPoint
from appliance.drawing.floor_plan import COLOURS, draw_floor_plan, svg
from appliance.drawing.number_text import bytes_text, count_text, seconds_text

# --- Drawings ---------------------------------------------------------------------------------------------------------

_WIDTH: Final = 1000
_LEFT: Final = 92  # room for the names of tracks, and for the scale of memory

_MEMORY_PARTS: Final[Sequence[tuple[str, Callable[[MemoryPoint], int]]]] = (
    ("batch", lambda point: point.batch_bytes),
    ("weights", lambda point: point.weight_bytes),
    ("gradients", lambda point: point.gradient_bytes),
    ("activations", lambda point: point.activation_bytes),
    ("working", lambda point: point.working_bytes),
)
MEMORY_PARTS: Final = tuple(name for name, _ in _MEMORY_PARTS)


def draw_memory(memory: MemoryPlan) -> str:
    """A column for each segment, in the order of the step; the wafer's memory is a line, unless it is far above."""
    height, bottom = 240, 26
    top = max(point.total_bytes + point.arriving_bytes for point in memory.points)
    shown = memory.capacity_bytes if memory.capacity_bytes <= 2 * top else top
    scale = (height - bottom - 14) / max(shown, top, 1)
    step = (_WIDTH - _LEFT) / len(memory.points)
    parts = [_scale_line(share * max(shown, top), scale, height - bottom) for share in (0, 0.25, 0.5, 0.75, 1)]
    peak = memory.peak
    for number, point in enumerate(memory.points):
        x, y = _LEFT + number * step, float(height - bottom)
        title = f"{point.segment}: {bytes_text(point.total_bytes)}"
        for name, part in _MEMORY_PARTS:
            title += f"\n{name} {bytes_text(part(point))}"
        title += f"\non its way {bytes_text(point.arriving_bytes)}"
        columns = []
        for colour, (_, part) in enumerate(_MEMORY_PARTS):
            nbytes = part(point)
            if nbytes:
                y -= nbytes * scale
                columns.append(_rectangle(f"m{colour}", x, y, max(step - 1, 0.6), nbytes * scale))
        if point.arriving_bytes:
            y -= point.arriving_bytes * scale
            columns.append(_rectangle("ahead", x, y, max(step - 1, 0.6), point.arriving_bytes * scale))
        if point is peak:
            anchor = "end" if number > len(memory.points) / 2 else "start"
            columns.append(
                f'<text class="peak" x="{x:.1f}" y="{max(y - 4, 10):.1f}" text-anchor="{anchor}">peak</text>'
            )
        parts.append(f"<g><title>{escape(title)}</title>{''.join(columns)}</g>")
    if memory.capacity_bytes == shown:
        y = height - bottom - shown * scale
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
    first, last = memory.points[0].segment, memory.points[-1].segment
    parts.append(f'<text class="axis" x="{_LEFT}" y="{height - 6}">{escape(first)}</text>')
    parts.append(f'<text class="axis" x="{_WIDTH}" y="{height - 6}" text-anchor="end">{escape(last)}</text>')
    return svg(_WIDTH, height, parts, "Memory of a wafer, segment by segment")


def draw_timeline(timeline: Timeline) -> str:
    """A line for each track, with its spans."""
    shards = sorted({span.track for span in timeline.spans} - {WAFER, WEIGHTS, GRADIENTS}, key=_shard_number)
    streamed = [WEIGHTS, WAFER, GRADIENTS]
    tracks = [*(streamed if any(span.track in streamed for span in timeline.spans) else ()), *shards]
    line, bottom = 44, 24
    height = line * len(tracks) + bottom
    scale = (_WIDTH - _LEFT) / (timeline.drawn_seconds or 1.0)
    parts = []
    for number, track in enumerate(tracks):
        y = number * line
        parts.append(f'<text class="track" x="{_LEFT - 10}" y="{y + 26}" text-anchor="end">{escape(track)}</text>')
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH}" y1="{y + 36.5}" y2="{y + 36.5}"/>')
    colours = _layer_colours(timeline.spans)
    for span in timeline.spans:
        y = tracks.index(span.track) * line + 8
        title = f"{span.label}\n{seconds_text(span.end - span.begin)} from {seconds_text(span.begin)} on"
        title += f"\n{bytes_text(span.nbytes)}" if span.nbytes else ""
        title += f"\nmicro-batch {span.micro_batch}" if span.micro_batch is not None else ""
        kind = f"c{colours[span.label.removesuffix(BACKWARD)]}" if span.track == WAFER else _kind(span)
        faded = " back" if span.label.endswith(BACKWARD) else ""
        parts.append(
            f'<rect class="span {kind}{faded}" x="{_LEFT + span.begin * scale:.2f}" y="{y}" '
            f'width="{max((span.end - span.begin) * scale, 0.5):.2f}" height="28"><title>{escape(title)}</title></rect>'
        )
    for quarter in range(5):
        x = _LEFT + quarter / 4 * (_WIDTH - _LEFT)
        anchor = ("start", "middle", "middle", "middle", "end")[quarter]
        seconds = seconds_text(timeline.drawn_seconds * quarter / 4)
        parts.append(f'<text class="axis" x="{x:g}" y="{height - 5}" text-anchor="{anchor}">{seconds}</text>')
    return svg(_WIDTH, height, parts, "One step, from its beginning to its last update")


def _layer_colours(spans: Iterable[Span]) -> dict[str, int]:
    layers = dict.fromkeys(
        span.label.removesuffix(BACKWARD) for span in sorted(spans, key=lambda s: s.begin) if span.track == WAFER
    )
    return {layer: number % COLOURS for number, layer in enumerate(layers)}


def _kind(span: Span) -> str:
    if span.micro_batch is not None:
        return f"c{span.micro_batch % COLOURS}"
    return {WEIGHTS: "m1", GRADIENTS: "m2"}.get(span.track, "update")


def _shard_number(track: str) -> int:
    return int(track.rpartition("-")[2])


def _rectangle(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"/>'


def _scale_line(nbytes: float, scale: float, bottom: float) -> str:
    y = bottom - nbytes * scale
    return (
        f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="axis" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{bytes_text(nbytes)}</text>'
    )


# --- The page ---------------------------------------------------------------------------------------------------------

_STYLE: Final = Path(drawing.__file__).with_name("report.css")


def report_page(report: Report) -> str:
    """The page of a report. It contains the JSON form, too, in the element with the id "report"."""
    data = report.to_json().replace("<", "\\u003c")  # nothing in it can end the element
    sections = (_summary, _layers, _gathering, _memory, _floor_plan, _timeline, _memoryx)
    body = "\n".join(section(report) for section in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Compile report</title>\n<style>\n{_STYLE.read_text()}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f'</main>\n<script type="application/json" id="report">\n{data}\n</script>\n</body>\n</html>\n'
    )


def _summary(report: Report) -> str:
    totals, memory = report.totals, report.memory
    gradients = "gradients from a wafer, in half" if report.half_gradients else "gradients from a wafer"
    tiles = (
        ("parameters", count_text(totals.parameters), totals.parameters),
        ("FLOPs in a step", count_text(totals.flops), totals.flops),
        ("predicted step", seconds_text(totals.step_seconds), totals.step_seconds),
        ("predicted rows/s", count_text(totals.rows_per_second), totals.rows_per_second),
        ("streamed to a wafer", bytes_text(totals.streamed_bytes), totals.streamed_bytes),
        (gradients, bytes_text(totals.gradient_bytes), totals.gradient_bytes),
        ("a wafer's peak", bytes_text(memory.needed_bytes), memory.needed_bytes),
        ("segments, kernels", f"{totals.segments}, {totals.wafer_kernels}", totals.segments),
    )
    notes = "".join(f"<p>{escape(note)}.</p>" for note in report.micro_batch_notes)
    shown = "".join(f'<div><dt>{name}</dt><dd data-value="{value}">{text}</dd></div>' for name, text, value in tiles)
    if report.regions:
        cluster = f"One wafer in {len(report.regions)} {_plural('region', len(report.regions))}"
    else:
        cluster = f"{report.num_csx} {_plural('wafer', report.num_csx)}"
        cluster += f", {report.num_shards} MemoryX {_plural('shard', report.num_shards)}"
    return (
        f"<header><h1>Compile report</h1><p>{cluster}, a batch of {report.batch_rows} rows. Artifact "
        f"<code>{escape(report.artifact)}</code></p>{notes}</header>\n"
        f'<dl class="tiles">{shown}</dl>'
    )


def _layers(report: Report) -> str:
    longest = max((layer.forward_seconds + layer.backward_seconds for layer in report.layers), default=0.0) or 1.0
    rows = []
    for layer in report.layers:
        seconds = layer.forward_seconds + layer.backward_seconds
        bar = f'<div class="bar" style="width:{100 * seconds / longest:.1f}%"></div>'
        rows.append(
            f"<tr><th>{escape(layer.layer)}</th>"
            + _number(layer.parameters, count_text(layer.parameters))
            + _number(layer.flops, count_text(layer.flops))
            + _number(layer.streamed_bytes, bytes_text(layer.streamed_bytes))
            + _number(layer.gradient_bytes, bytes_text(layer.gradient_bytes))
            + _number(layer.activation_bytes, bytes_text(layer.activation_bytes))
            + _number(layer.forward_seconds, seconds_text(layer.forward_seconds))
            + _number(layer.backward_seconds, seconds_text(layer.backward_seconds))
            + f'<td class="bars">{bar}</td><td title="{escape(layer.reason)}">{escape(layer.library)}</td></tr>'
        )
    head = ("parameters", "FLOPs", "streamed", "gradients", "activations", "forward", "backward", "", "kernel")
    return _section(
        "Layers",
        "Parameters are counted with the first layer that reads them. FLOPs are of the whole batch, bytes and seconds "
        "of one wafer: all wafers do the same at once.",
        _table(("layer", *head), rows),
        _reasons(report),
    )


def _gathering(report: Report) -> str:
    """The lines for which values of the batch are gathered; empty if there are none."""
    gathering = report.gathering
    if not gathering.lines:
        return ""
    rows = [
        f"<tr><th>{escape(line.source)}</th><td>{escape(line.reason)}</td>"
        f"{_number(line.nbytes, bytes_text(line.nbytes))}</tr>"
        for line in gathering.lines
    ]
    return _section(
        "Gathered",
        "Rows of all wafers are gathered where no sharding rule holds for an operation. Bytes are those that a wafer "
        f"sends and receives in a step. Gathering takes {gathering.share_text} of the predicted time of a step.",
        _table(("line", "reason", "bytes"), rows),
    )


def _reasons(report: Report) -> str:
    layers: dict[str, list[str]] = {}
    for layer in report.layers:
        layers.setdefault(layer.reason, []).append(layer.layer)
    items = (f"<li>{escape(', '.join(names))}: {escape(reason)}</li>" for reason, names in layers.items())
    return f"<details><summary>Why these kernels</summary><ul>{''.join(items)}</ul></details>"


def _memory(report: Report) -> str:
    memory = report.memory
    if not isinstance(memory, MemoryPlan):
        return _region_memory(memory)
    legend = "".join(f'<li><i class="m{n}"></i>{name}</li>' for n, name in enumerate(MEMORY_PARTS))
    share = memory.peak.total_bytes / memory.capacity_bytes
    return _section(
        "Memory of a wafer",
        f"At most {bytes_text(memory.peak.total_bytes)}, {share:.1%} of the wafer's "
        f"{bytes_text(memory.capacity_bytes)}, in segment <b>{escape(memory.peak.segment)}</b>. Weights that are on "
        "their way ahead of their turn (outlined) are not counted: on one host they lie in MemoryX's memory.",
        f'<ul class="legend">{legend}<li><i class="ahead"></i>on its way</li></ul>',
        f'<div class="wide">{draw_memory(memory)}</div>',
        "<p>Of each process, beyond what it has before a step: memory of its own, what it may hold besides where its "
        "links go to other hosts, and, on a SwarmX node between two hosts, what it passes on.</p>",
        _table(("role", "own", "links between hosts", "passed on"), map(_role_memory, report.role_memory)),
    )


def _role_memory(memory: RoleMemory) -> str:
    return (
        f"<tr><th>{memory.role}</th>"
        + _number(memory.own_bytes, bytes_text(memory.own_bytes))
        + _number(memory.link_bytes, bytes_text(memory.link_bytes))
        + _number(memory.relay_bytes, bytes_text(memory.relay_bytes))
        + "</tr>"
    )


def _region_memory(memory: PipelineMemory) -> str:
    rows = []
    for region in memory.regions:
        parts = (region.state_bytes, region.joined_bytes, region.activation_bytes, region.working_bytes)
        cells = "".join(_number(nbytes, bytes_text(nbytes)) for nbytes in (*parts, region.total_bytes))
        rows.append(f"<tr><th>{escape(region.name)}</th>{cells}</tr>")
    return _section(
        "Memory of the wafer",
        f"At most {bytes_text(memory.needed_bytes)}, {memory.needed_bytes / memory.capacity_bytes:.1%} of the wafer's "
        f"{bytes_text(memory.capacity_bytes)}, of which the batch takes {bytes_text(memory.batch_bytes)}. Activations "
        "are those of all micro-batches that may be in flight.",
        _table(("region", "weights and state", "gradients", "activations", "working", "together"), rows),
    )


def _floor_plan(report: Report) -> str:
    if report.regions:
        return _regions(report)
    if not report.floor_plan.regions:
        return ""
    seconds = {layer.layer: layer.forward_seconds + layer.backward_seconds for layer in report.layers}
    return _section(
        "Floor plan",
        "The wafer as layer-pipelined execution would divide it: a region for each layer, its area in proportion to "
        "the layer's predicted time, so that all layers take equally long. The line is the way of the activations; "
        "the gradients go back the same way. (Weight streaming, which this plan is for, gives each segment the whole "
        "wafer.)",
        f'<div class="floor">{draw_floor_plan(report.floor_plan, seconds)}</div>',
    )


def _regions(report: Report) -> str:
    rows = [
        f"<tr><th>region-{number}</th><td>{escape(region.name)}</td>"
        + _number(region.busy_seconds, seconds_text(region.busy_seconds))
        + _number(region.idle_seconds, seconds_text(region.idle_seconds))
        + "</tr>"
        for number, region in enumerate(report.regions)
    ]
    return _section(
        "Floor plan",
        "The regions of the wafer, in which the step runs: each has the weights, the optimizer state and all work of "
        "its layers, and an area in proportion to that work. The line is the way of the activations; the gradients go "
        "back the same way.",
        _table(("region", "layers", "busy", "idle (bubbles)"), rows),
        f'<div class="floor">{draw_floor_plan(report.floor_plan, {r.name: r.busy_seconds for r in report.regions})}'
        "</div>",
    )


def _timeline(report: Report) -> str:
    machine, timeline = report.machine, report.timeline
    busy = timeline.wafer_busy_seconds / timeline.step_seconds if timeline.step_seconds else 0.0
    note = " Colours are micro-batches; gaps are bubbles." if report.regions else ""
    if timeline.left_out_rounds:
        seconds = seconds_text(timeline.left_out_seconds)
        note = f" {timeline.left_out_rounds} rounds are not drawn, as they are like others; they take {seconds}."
    return _section(
        "One step",
        f"Predicted: {seconds_text(timeline.step_seconds)}, of which a wafer computes {busy:.0%}. Segments of the "
        f"backward pass are paler.{note}",
        f'<div class="wide">{draw_timeline(timeline)}</div>',
        "<p>The prediction rests on these rates, "
        f"{escape(machine.source)}: products {count_text(machine.float32_flops_per_second)}FLOP/s in float32 and "
        f"{count_text(machine.half_flops_per_second)}FLOP/s in bfloat16; {bytes_text(machine.bytes_per_second)}/s read "
        f"and written element by element; {bytes_text(machine.stream_bytes_per_second)}/s on the stream (a copy in "
        f"memory); {seconds_text(machine.operation_seconds)} for each operation and "
        f"{seconds_text(machine.message_seconds)} for each message. It is good for comparing layers; caches, other "
        "threads and other hosts make real times differ.</p>",
    )


def _memoryx(report: Report) -> str:
    if not report.shards:
        return ""
    shards, updates = [], []
    for shard in report.shards:
        total = sum(update.seconds for update in shard.updates)
        shards.append(
            f"<tr><th>memoryx-{shard.shard}</th>"
            + _number(shard.weight_bytes, bytes_text(shard.weight_bytes))
            + _number(shard.other_bytes, bytes_text(shard.other_bytes))
            + _number(shard.states, str(shard.states))
            + _number(total, seconds_text(total))
            + "</tr>"
        )
        for update in shard.updates:
            updates.append(
                f"<tr><th>memoryx-{shard.shard}</th>"
                + _number(update.kernel, str(update.kernel))
                + _number(update.runs, str(update.runs))
                + _number(update.elements, count_text(update.elements))
                + _number(update.seconds, seconds_text(update.seconds))
                + f"<td>{escape(update.library)}</td><td>{escape(update.reason)}</td></tr>"
            )
    return _section(
        "MemoryX",
        "What each shard holds, and what its kernels do in a step.",
        _table(("shard", "weights", "optimizer and other state", "tensors", "computing"), shards),
        "<details><summary>Kernels</summary>"
        + _table(("shard", "kernel", "runs", "elements replaced", "seconds", "library", "because"), updates)
        + "</details>",
    )


def _section(title: str, text: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2><p>{text}</p>{''.join(parts)}</section>"


def _table(head: Iterable[str], rows: Iterable[str]) -> str:
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _number(value: float, text: str) -> str:
    return f'<td class="number" data-value="{value}">{text}</td>'


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
