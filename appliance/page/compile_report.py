"""The compile report of a job as the page shows it, read from the artifact's folder.

Only its JSON form is read: the compiler, and torch with it, are not loaded by the management service.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from appliance.drawing.floor_plan import FloorPlan, Region, draw_floor_plan

DATA: Final = "report.json"
PAGE: Final = "report.html"
MAX_REPORT_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Forward and backward together; of one wafer."""

    layer: str
    parameters: int
    streamed_bytes: int
    gradient_bytes: int
    seconds: float  # predicted
    backward_seconds: float  # of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What a MemoryX shard holds."""

    shard: int
    weight_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """The part of appliance.compiler.report.report.Report that is shown."""

    num_csx: int
    batch_rows: int
    parameters: int
    streamed_bytes: int
    step_seconds: float  # predicted
    layers: tuple[Layer, ...]
    shards: tuple[Shard, ...]
    floor_plan: FloorPlan
    busy_seconds: Mapping[str, float]  # of the regions of a pipelined wafer

    @property
    def name(self) -> str:
        """What its executions do: there is a backward pass, or none."""
        return "training" if any(layer.backward_seconds for layer in self.layers) else "evaluation"

    def drawing(self) -> str:
        """The floor plan as SVG; empty where there is none."""
        seconds = {**{layer.layer: layer.seconds for layer in self.layers}, **self.busy_seconds}
        return draw_floor_plan(self.floor_plan, seconds) if self.floor_plan.regions else ""


def read_report(artifact: str) -> CompileReport | None:
    """The report in a folder; None where there is none that can be read."""
    data = read_capped(artifact, DATA)
    if data is None:
        return None
    try:
        return _report(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def read_page(artifact: str) -> bytes | None:
    """The compiler's own page of the report; None where there is none."""
    return read_capped(artifact, PAGE)


def read_capped(artifact: str, name: str) -> bytes | None:
    """A file of an artifact, unless it is too large for a report."""
    if not artifact:
        return None
    try:
        with (Path(artifact) / name).open("rb") as file:
            data = file.read(MAX_REPORT_BYTES + 1)
    except OSError:
        return None
    return data if len(data) <= MAX_REPORT_BYTES else None


def _report(data: Mapping[str, Any]) -> CompileReport:
    totals, plan = data["totals"], data["floor_plan"]
    layers = tuple(_layer(layer) for layer in data["layers"])
    busy = {str(region["name"]): float(region["busy_seconds"]) for region in data.get("regions", ())}
    known = {layer.layer for layer in layers} | busy.keys()
    regions = tuple(_region(region) for region in plan["regions"])
    if not known.issuperset(region.layer for region in regions) or min(plan["width"], plan["height"]) < 1:
        raise ValueError("the floor plan is not one of these layers")
    return CompileReport(
        num_csx=int(data["num_csx"]),
        batch_rows=int(data["batch_rows"]),
        parameters=int(totals["parameters"]),
        streamed_bytes=int(totals["streamed_bytes"]),
        step_seconds=float(totals["step_seconds"]),
        layers=layers,
        shards=tuple(_shard(shard) for shard in data["shards"]),
        floor_plan=FloorPlan(width=int(plan["width"]), height=int(plan["height"]), regions=regions),
        busy_seconds=busy,
    )


def _layer(data: Mapping[str, Any]) -> Layer:
    return Layer(
        layer=str(data["layer"]),
        parameters=int(data["parameters"]),
        streamed_bytes=int(data["streamed_bytes"]),
        gradient_bytes=int(data["gradient_bytes"]),
        seconds=float(data["forward_seconds"]) + float(data["backward_seconds"]),
        backward_seconds=float(data["backward_seconds"]),
    )


def _shard(data: Mapping[str, Any]) -> Shard:
    return Shard(shard=int(data["shard"]), weight_bytes=int(data["weight_bytes"]), other_bytes=int(data["other_bytes"]))


def _region(data: Mapping[str, Any]) -> Region:
    return Region(
        layer=str(data["layer"]),
        x=int(data["x"]),
        y=int(data["y"]),
        width=int(data["width"]),
        height=int(data["height"]),
    )
