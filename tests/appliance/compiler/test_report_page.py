"""The page: whole, without anything from elsewhere, and with the numbers of the JSON form."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from reported_steps import MACHINE, memory_of, trained_blocks

from appliance.compiler.report.builder import make_report
from appliance.compiler.report.drawings import draw_memory, draw_timeline
from appliance.compiler.report.page import report_page
from appliance.compiler.report.report import Report
from appliance.drawing.floor_plan import draw_floor_plan

VOID = {"meta"}


class Page(HTMLParser):
    """Elements as they are nested, their attributes, and the text of some."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[tuple[str, str | None]]] = []  # of tables: text and data-value of each cell
        self.data = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append(("", dict(attrs).get("data-value")))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.data += data
        elif self.rows and self.open[-1:] in (["td"], ["th"]):
            text, value = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, value)


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report(trained_blocks().plan(2, 2), "0123abc", MACHINE)


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    return report_page(report)


def test_nothing_comes_from_elsewhere(text: str) -> None:
    page = Page(text)
    assert {tag for tag, _ in page.seen} & {"link", "img", "iframe", "object", "use", "image", "a", "base"} == set()
    for tag, attributes in page.seen:
        assert not {"src", "href", "xlink:href", "action", "srcset"} & attributes.keys(), tag
        assert not any(name.startswith("on") for name in attributes), tag
    assert not re.search(r"https?:|url\(|@import|//[a-z]", text)
    scripts = [attributes for tag, attributes in page.seen if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "report"}]


def test_the_numbers_are_those_of_the_json(report: Report, text: str) -> None:
    page = Page(text)
    data = json.loads(page.data)
    assert data == json.loads(report.to_json())
    rows = {row[0][0]: row for row in page.rows}
    fields = ("parameters", "flops", "streamed_bytes", "gradient_bytes", "activation_bytes")
    for layer in data["layers"]:
        values = [value for _, value in rows[layer["layer"]] if value is not None]
        expected = [layer[field] for field in (*fields, "forward_seconds", "backward_seconds")]
        assert [float(value) for value in values] == expected
    shard_rows = [row for row in page.rows if row[0][0].startswith("memoryx-") and len(row) == 5]
    assert [float(row[1][1] or 0) for row in shard_rows] == [shard["weight_bytes"] for shard in data["shards"]]
    assert [float(row[2][1] or 0) for row in shard_rows] == [shard["other_bytes"] for shard in data["shards"]]
    tiles = [float(attributes["data-value"] or 0) for tag, attributes in page.seen if tag == "dd"]
    totals = data["totals"]
    assert tiles[:4] == [totals["parameters"], totals["flops"], totals["step_seconds"], totals["rows_per_second"]]
    assert tiles[6] == memory_of(report).peak.total_bytes


def test_drawings_show_every_region_segment_and_message(report: Report) -> None:
    floor = ElementTree.fromstring(
        draw_floor_plan(report.floor_plan, {layer.layer: layer.forward_seconds for layer in report.layers})
    )
    drawn = [
        tuple(int(element.attrib[name]) for name in ("x", "y", "width", "height")) for element in floor.iter("rect")
    ]
    assert drawn == [(r.x, r.y, r.width, r.height) for r in report.floor_plan.regions]
    memory = ElementTree.fromstring(draw_memory(memory_of(report)))
    assert len(memory.findall("g/title")) == len(memory_of(report).points)
    timeline = ElementTree.fromstring(draw_timeline(report.timeline))
    assert len(timeline.findall("rect/title")) == len(report.timeline.spans)
    width = float(timeline.attrib["viewBox"].split()[2])
    for element in timeline.iter("rect"):
        assert float(element.attrib["x"]) + float(element.attrib["width"]) <= width + 0.51


def test_names_cannot_become_markup(report: Report) -> None:
    hostile = "</script><script>alert(1)</script>\"'&"
    layers = tuple(dataclasses.replace(layer, layer=hostile) for layer in report.layers)
    regions = tuple(dataclasses.replace(region, layer=hostile) for region in report.floor_plan.regions)
    spans = tuple(dataclasses.replace(span, label=hostile) for span in report.timeline.spans)
    points = tuple(dataclasses.replace(point, segment=hostile) for point in memory_of(report).points)
    changed = dataclasses.replace(
        report,
        artifact=hostile,
        layers=layers,
        floor_plan=dataclasses.replace(report.floor_plan, regions=regions),
        timeline=dataclasses.replace(report.timeline, spans=spans),
        memory=dataclasses.replace(memory_of(report), points=points),
    )
    page = Page(report_page(changed))
    assert [tag for tag, _ in page.seen].count("script") == 1
    assert json.loads(page.data)["artifact"] == hostile
