"""The floor plan of a wafer, with a region for each layer as in layer pipelined mode, and its drawing as SVG."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from typing import Final

from appliance.drawing.number_text import seconds_text

# --- Floor plans ------------------------------------------------------------------------------------------------------

# A square grid of about as many cores as a WSE-2 has (850,000).
WIDTH: Final = 922
HEIGHT: Final = 922


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A rectangle of cores for one layer. (x, y) is its upper left corner."""

    layer: str
    x: int
    y: int
    width: int
    height: int

    @property
    def area(self) -> int:
        return self.width * self.height


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorPlan:
    """A wafer of `width` x `height` cores, with a region for each layer."""

    width: int
    height: int
    regions: tuple[Region, ...]


def plan_floor(work: Sequence[tuple[str, float]], width: int = WIDTH, height: int = HEIGHT) -> tuple[Region, ...]:
    """Divides the whole wafer into a region for each layer.

    The area of a region is proportional to the work of its layer: then all layers take equally long, and none waits for
    another. Layers lie in rows, from left to right and in the next row back again, so that consecutive layers are
    neighbours. Rows end where it makes the regions as square as possible.

    Args:
        work: the layers in the order of the network, each with its work in any unit.
        width: width of the wafer, in cores.
        height: height of the wafer, in cores.

    Raises:
        ValueError: a layer's work is not a positive number, or there are more layers than rows of cores.
    """
    if any(not 0 < amount < float("inf") for _, amount in work):
        raise ValueError("every layer has some work to do, and a finite amount of it")
    if len(work) > min(width, height):
        raise ValueError(f"{len(work)} layers do not fit a wafer of {width} x {height} cores")
    if not work:
        return ()
    amounts = [amount for _, amount in work]
    rows = _rows(amounts, width, height)
    heights = _cut(height, [sum(amounts[begin:end]) for begin, end in rows])
    regions = []
    for number, ((begin, end), (top, bottom)) in enumerate(zip(rows, pairwise(heights), strict=True)):
        for (layer, _), (left, right) in zip(work[begin:end], pairwise(_cut(width, amounts[begin:end])), strict=True):
            x = width - right if number % 2 else left
            regions.append(Region(layer=layer, x=x, y=top, width=right - left, height=bottom - top))
    return tuple(regions)


def _rows(amounts: Sequence[float], width: int, height: int) -> list[tuple[int, int]]:
    """Where rows begin and end, with the least possible sum of area * (width/height + height/width) of the regions.

    In a row with the sum s, a region of amount a is width * a / s wide and height * s / total high. Dynamic
    programming: best[end] is the least cost of the layers before `end`, in whole rows.
    """
    before = [0.0, *accumulate(amounts)]
    squares = [0.0, *accumulate(amount**2 for amount in amounts)]
    square = width * before[-1] / height
    best = [0.0] + [float("inf")] * len(amounts)
    begins = [0] * (len(amounts) + 1)
    for end in range(1, len(amounts) + 1):
        for begin in range(end):
            row = before[end] - before[begin]
            flat, upright = square * (squares[end] - squares[begin]) / row**2, (end - begin) * row**2 / square
            cost = best[begin] + flat + upright
            if cost < best[end]:
                best[end], begins[end] = cost, begin
    rows = []
    end = len(amounts)
    while end:
        rows.append((begins[end], end))
        end = begins[end]
    return rows[::-1]


def _cut(length: int, amounts: Sequence[float]) -> list[int]:
    """Where to cut a length into parts proportional to the amounts; each part is at least 1 long."""
    total = sum(amounts)
    cuts = [0]
    for number, sum_before in enumerate(accumulate(amounts), 1):
        wanted = round(length * sum_before / total)
        cuts.append(min(max(wanted, cuts[-1] + 1), length - (len(amounts) - number)))
    return cuts


# --- SVG --------------------------------------------------------------------------------------------------------------
#
# Colours are classes, which the page defines. There are no styles in the drawing, so that a page may forbid them. Names
# come from the user's modules and are escaped.

COLOURS: Final = 8  # classes c0 .. c7


def draw_floor_plan(plan: FloorPlan, seconds: Mapping[str, float]) -> str:
    """Draws a rectangle for each layer, and a line through them in the order of the network. seconds: work by layer."""
    regions, names = [], []
    for number, region in enumerate(plan.regions):
        share = region.area / (plan.width * plan.height)
        title = f"{region.layer}: {share:.1%} of the wafer, {region.width} × {region.height} cores, "
        title += f"{seconds_text(seconds[region.layer])} of work in a step"
        regions.append(
            f'<rect class="region c{number % COLOURS}" x="{region.x}" y="{region.y}" width="{region.width}" '
            f'height="{region.height}"><title>{escape(title)}</title></rect>'
        )
        if region.width >= 60 and region.height >= 44:
            size = min(34.0, region.width / max(len(region.layer), 4) * 1.5, region.height / 2.6)
            x, y = region.x + region.width / 2, region.y + region.height / 2
            names.append(f'<text class="name" x="{x:g}" y="{y:g}" font-size="{size:.1f}">{escape(region.layer)}</text>')
            if region.height >= 3.4 * size:
                names.append(
                    f'<text class="part" x="{x:g}" y="{y + size:.1f}" font-size="{size * 0.66:.1f}">{share:.1%}</text>'
                )
    middles = " ".join(f"{r.x + r.width / 2:g},{r.y + r.height / 2:g}" for r in plan.regions)
    path = f'<polyline class="path" points="{middles}"/>'
    return svg(plan.width, plan.height, [*regions, path, *names], "The wafer, divided into a region for each layer")


def svg(width: int, height: int, parts: Iterable[str], name: str) -> str:
    """A drawing that scales to the available width. name: its description for screen readers."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">\n' + "\n".join(parts) + "\n</svg>"
    )
