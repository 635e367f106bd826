"""The drawings of a compile report as SVG: the memory of a wafer, and one step.

Colours are classes, which the page defines for light and dark. Names come from the user's modules and are escaped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from appliance.compiler.partition.layers import BACKWARD
from appliance.compiler.report.timeline import GRADIENTS, WAFER, WEIGHTS, Span, Timeline
from appliance.compiler.wafer_schedule.memory_plan import MemoryPlan, MemoryPoint
from appliance.drawing.floor_plan import COLOURS
from appliance.drawing.pages import template_environment

TEMPLATES: Final = template_environment(Path(__file__).with_name("templates"))
_WIDTH: Final = 1000
_LEFT: Final = 92  # room for the names of tracks, and for the scale of memory
_SIZES: Final = {"width": _WIDTH, "left": _LEFT}

# --- Memory -----------------------------------------------------------------------------------------------------------

_BOTTOM: Final = 214  # y of the lowest line; the names of segments are below
_HIGHEST: Final = 200  # of a column
_MEMORY_PARTS: Final[Sequence[tuple[str, Callable[[MemoryPoint], int]]]] = (
    ("batch", lambda point: point.batch_bytes),
    ("weights", lambda point: point.weight_bytes),
    ("gradients", lambda point: point.gradient_bytes),
    ("activations", lambda point: point.activation_bytes),
    ("working", lambda point: point.working_bytes),
)
MEMORY_PARTS: Final = tuple(name for name, _ in _MEMORY_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """The memory of a wafer in one segment. parts: bytes by name; bars: class, y and height of each rectangle."""

    point: MemoryPoint
    x: float
    parts: Sequence[tuple[str, int]]
    bars: Sequence[tuple[str, float, float]]


def draw_memory(memory: MemoryPlan) -> str:
    """A column for each segment, in the order of the step; the wafer's memory is a line, unless it is far above."""
    top = max(point.total_bytes + point.arriving_bytes for point in memory.points)
    shown = memory.capacity_bytes if memory.capacity_bytes <= 2 * top else top
    scale, step = _HIGHEST / max(shown, 1), (_WIDTH - _LEFT) / len(memory.points)
    return TEMPLATES.get_template("memory.svg").render(
        **_SIZES,
        bottom=_BOTTOM,
        lines=[(_BOTTOM - share * shown * scale, share * shown) for share in (0, 0.25, 0.5, 0.75, 1)],
        columns=[_column(point, _LEFT + number * step, scale) for number, point in enumerate(memory.points)],
        column_width=max(step - 1, 0.6),
        peak=memory.peak,
        has_limit=memory.capacity_bytes == shown,
    )


def _column(point: MemoryPoint, x: float, scale: float) -> _Column:
    parts = [(name, part(point)) for name, part in _MEMORY_PARTS]
    bars = []
    y = float(_BOTTOM)
    for kind, nbytes in (*((f"m{n}", nbytes) for n, (_, nbytes) in enumerate(parts)), ("ahead", point.arriving_bytes)):
        if nbytes:
            y -= nbytes * scale
            bars.append((kind, y, nbytes * scale))
    return _Column(point=point, x=x, parts=parts, bars=bars)


# --- One step ---------------------------------------------------------------------------------------------------------

_TRACK_HEIGHT: Final = 44


def draw_timeline(timeline: Timeline) -> str:
    """A line for each track, with its spans."""
    streamed = [WEIGHTS, WAFER, GRADIENTS]
    others = sorted({span.track for span in timeline.spans}.difference(streamed), key=_track_number)
    tracks = [*(streamed if any(span.track in streamed for span in timeline.spans) else ()), *others]
    colours = _layer_colours(timeline.spans)
    return TEMPLATES.get_template("timeline.svg").render(
        **_SIZES,
        tracks=tracks,
        track_height=_TRACK_HEIGHT,
        spans=[(span, tracks.index(span.track) * _TRACK_HEIGHT, _kind(span, colours)) for span in timeline.spans],
        seconds=timeline.drawn_seconds,
        scale=(_WIDTH - _LEFT) / (timeline.drawn_seconds or 1.0),
    )


def _layer_colours(spans: Iterable[Span]) -> dict[str, int]:
    layers = dict.fromkeys(
        span.label.removesuffix(BACKWARD) for span in sorted(spans, key=lambda s: s.begin) if span.track == WAFER
    )
    return {layer: number % COLOURS for number, layer in enumerate(layers)}


def _kind(span: Span, colours: dict[str, int]) -> str:
    """The classes of a span. colours: by layer."""
    if span.track == WAFER:
        kind = f"c{colours[span.label.removesuffix(BACKWARD)]}"
    elif span.micro_batch is not None:
        kind = f"c{span.micro_batch % COLOURS}"
    else:
        kind = {WEIGHTS: "m1", GRADIENTS: "m2"}.get(span.track, "update")
    return f"{kind} back" if span.label.endswith(BACKWARD) else kind


def _track_number(track: str) -> int:
    return int(track.rpartition("-")[2])
