"""Reads the compile report of a job from the artifact's folder, for the page.

Its JSON form is read without the compiler's classes, so that the management service does not import torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from appliance.drawing.floor_plan import FloorPlan, Region, draw_floor_plan
from waferbox.execution_folders import REPORT_PAGE

DATA: Final = "report.json"
MAX_REPORT_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer on one wafer, forward and backward together. Seconds are predicted; `seconds` is the sum of both."""

    layer: str
    parameters: int
    streamed_bytes: int
    gradient_bytes: int
    seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The states of a MemoryX shard, in bytes."""

    shard: int
    weight_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """The part of `appliance.compiler.report.report.Report` that is shown.

    `step_seconds` is predicted; `busy_seconds` has the regions of a pipelined wafer.
    """

    num_csx: int
    batch_rows: int
    parameters: int
    streamed_bytes: int
    step_seconds: float
    layers: tuple[Layer, ...]
    shards: tuple[Shard, ...]
    floor_plan: FloorPlan
    busy_seconds: Mapping[str, float]

    @property
    def name(self) -> str:
        """ "training" if the step has a backward pass, else "evaluation"."""
        return "training" if any(layer.backward_seconds for layer in self.layers) else "evaluation"

    def drawing(self) -> str:
        """The floor plan as SVG; empty if there is none."""
        seconds = {**{layer.layer: layer.seconds for layer in self.layers}, **self.busy_seconds}
        return draw_floor_plan(self.floor_plan, seconds) if self.floor_plan.regions else ""


def read_report(artifact: str) -> CompileReport | None:
    """The report in a folder; None if there is none that can be read."""
    data = read_capped(artifact, DATA)
    if data is None:
        return None
    try:
        return _report(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def read_page(artifact: str) -> bytes | None:
    """The HTML page of the report; None if there is none."""
    return read_capped(artifact, REPORT_PAGE)


def read_capped(artifact: str, name: str) -> bytes | None:
    """The content of a file of an artifact; None if it cannot be read, or is too large for a report."""
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
