"""The drawings of a report's page, as SVG: the wafer's memory, the step as a timeline; `floor_drawing` has the wafer.

Colours are classes, which the page defines for light and dark. Names come from the user's modules and are escaped.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Final

from appliance.compiler.partition.layers import BACKWARD
from appliance.compiler.report.timeline import GRADIENTS, WAFER, WEIGHTS, Span, Timeline
from appliance.compiler.wafer.memory_plan import MemoryPlan, MemoryPoint
from appliance.drawing.floor_drawing import COLOURS, svg
from appliance.drawing.quantities import bytes_text, seconds_text

_WIDTH: Final = 1000
_LEFT: Final = 92  # for the names of tracks, and the scale of memory

_MEMORY_PARTS: Final[Sequence[tuple[str, Callable[[MemoryPoint], int]]]] = (
    ("batch", lambda point: point.batch_bytes),
    ("weights", lambda point: point.weight_bytes),
    ("gradients", lambda point: point.gradient_bytes),
    ("activations", lambda point: point.activation_bytes),
    ("working", lambda point: point.working_bytes),
)
MEMORY_PARTS: Final = tuple(name for name, _ in _MEMORY_PARTS)


def draw_memory(memory: MemoryPlan) -> str:
    """A column for each segment, in the order of the step, with the wafer's memory as a line where it is in sight."""
    height, bottom = 240, 26
    top = max(point.total_bytes + point.arriving_bytes for point in memory.points)
    shown = memory.capacity_bytes if memory.capacity_bytes <= 2 * top else top
    scale = (height - bottom - 14) / max(shown, top, 1)
    step = (_WIDTH - _LEFT) / len(memory.points)
    parts = [_scale_line(share * max(shown, top), scale, height - bottom) for share in (0, 0.25, 0.5, 0.75, 1)]
    peak = memory.peak
    for number, point in enumerate(memory.points):
        x, y = _LEFT + number * step, float(height - bottom)
        told = f"{point.segment}: {bytes_text(point.total_bytes)}"
        for name, part in _MEMORY_PARTS:
            told += f"\n{name} {bytes_text(part(point))}"
        told += f"\non its way {bytes_text(point.arriving_bytes)}"
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
        parts.append(f"<g><title>{escape(told)}</title>{''.join(columns)}</g>")
    if memory.capacity_bytes == shown:
        y = height - bottom - shown * scale
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
    first, last = memory.points[0].segment, memory.points[-1].segment
    parts.append(f'<text class="axis" x="{_LEFT}" y="{height - 6}">{escape(first)}</text>')
    parts.append(f'<text class="axis" x="{_WIDTH}" y="{height - 6}" text-anchor="end">{escape(last)}</text>')
    return svg(_WIDTH, height, parts, "Memory of a wafer, segment by segment")


def draw_timeline(timeline: Timeline) -> str:
    """A line for each track: when a wafer computes, what travels, what each shard does."""
    shards = sorted({span.track for span in timeline.spans} - {WAFER, WEIGHTS, GRADIENTS}, key=_shard_number)
    streamed = [WEIGHTS, WAFER, GRADIENTS]
    tracks = [*(streamed if any(span.track in streamed for span in timeline.spans) else ()), *shards]
    line, bottom = 44, 24
    height = line * len(tracks) + bottom
    scale = (_WIDTH - _LEFT) / (timeline.step_seconds or 1.0)
    parts = []
    for number, track in enumerate(tracks):
        y = number * line
        parts.append(f'<text class="track" x="{_LEFT - 10}" y="{y + 26}" text-anchor="end">{escape(track)}</text>')
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH}" y1="{y + 36.5}" y2="{y + 36.5}"/>')
    colours = _layer_colours(timeline.spans)
    for span in timeline.spans:
        y = tracks.index(span.track) * line + 8
        told = f"{span.label}\n{seconds_text(span.end - span.begin)} from {seconds_text(span.begin)} on"
        told += f"\n{bytes_text(span.nbytes)}" if span.nbytes else ""
        told += f"\nmicro-batch {span.micro_batch}" if span.micro_batch is not None else ""
        kind = f"c{colours[span.label.removesuffix(BACKWARD)]}" if span.track == WAFER else _kind(span)
        faded = " back" if span.label.endswith(BACKWARD) else ""
        parts.append(
            f'<rect class="span {kind}{faded}" x="{_LEFT + span.begin * scale:.2f}" y="{y}" '
            f'width="{max((span.end - span.begin) * scale, 0.5):.2f}" height="28"><title>{escape(told)}</title></rect>'
        )
    for quarter in range(5):
        x = _LEFT + quarter / 4 * (_WIDTH - _LEFT)
        anchor = ("start", "middle", "middle", "middle", "end")[quarter]
        seconds = seconds_text(timeline.step_seconds * quarter / 4)
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
