"""Makes the page of a report: one file of HTML with drawings in SVG, which needs no script, font or network."""

from typing import Final

from appliance.compiler.report.drawings import MEMORY_PARTS, TEMPLATES, draw_memory, draw_timeline
from appliance.compiler.report.report import Report
from appliance.compiler.wafer_schedule.memory_plan import MemoryPlan
from appliance.drawing.floor_plan import draw_floor_plan

_PAGE: Final = TEMPLATES.get_template("report.html")


def report_page(report: Report) -> str:
    """The page of a report. It contains the JSON form, too, in the element with the id "report"."""
    layer_seconds = {layer.layer: layer.forward_seconds + layer.backward_seconds for layer in report.layers}
    region_seconds = {region.name: region.busy_seconds for region in report.regions}
    memory, plan, timeline = report.memory, report.floor_plan, report.timeline
    return _PAGE.render(
        report=report,
        data=report.to_json().replace("<", "\\u003c"),  # nothing in it can end the element
        layer_seconds=layer_seconds,
        longest_seconds=max(layer_seconds.values(), default=0.0) or 1.0,
        memory_parts=MEMORY_PARTS,
        memory_drawing=draw_memory(memory) if isinstance(memory, MemoryPlan) else "",
        floor_drawing=draw_floor_plan(plan, region_seconds or layer_seconds) if plan.regions else "",
        timeline_drawing=draw_timeline(timeline),
        busy_share=timeline.wafer_busy_seconds / timeline.step_seconds if timeline.step_seconds else 0.0,
    )
