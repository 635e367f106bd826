"""The floor plan of a wafer as SVG.

Colours are classes, which the page that it is shown on defines; there are no styles in it, so that a page may forbid
them. Names come from the user's modules and are escaped.
"""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Final

from appliance.drawing.floor_plan import FloorPlan
from appliance.drawing.quantities import seconds_text

COLOURS: Final = 8  # classes c0 .. c7


def draw_floor_plan(plan: FloorPlan, seconds: Mapping[str, float]) -> str:
    """A rectangle for each layer; a line leads through them in the order of the network. seconds: each layer's work."""
    regions, names = [], []
    for number, region in enumerate(plan.regions):
        share = region.area / (plan.width * plan.height)
        told = f"{region.layer}: {share:.1%} of the wafer, {region.width} × {region.height} cores, "
        told += f"{seconds_text(seconds[region.layer])} of work in a step"
        regions.append(
            f'<rect class="region c{number % COLOURS}" x="{region.x}" y="{region.y}" width="{region.width}" '
            f'height="{region.height}"><title>{escape(told)}</title></rect>'
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
    """A drawing, as wide as there is room. name: what it shows, for those who do not see it."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">\n' + "\n".join(parts) + "\n</svg>"
    )
