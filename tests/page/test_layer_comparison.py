"""The measured times of layers beside the predicted ones."""

from dataclasses import replace

from appliance.compiler.partition.layers import BACKWARD
from appliance.drawing.floor_plan import FloorPlan
from appliance.page import step_comparison
from appliance.page.compile_report import CompileReport, Layer
from appliance.page.step_comparison import compare_layers
from wsc.v1.observation_pb2 import LayerTime


def layer(name: str, seconds: float) -> Layer:
    return Layer(
        layer=name, parameters=1, streamed_bytes=1, gradient_bytes=1, seconds=seconds, backward_seconds=seconds / 2
    )


REPORT = CompileReport(
    num_csx=1,
    batch_rows=8,
    parameters=2,
    streamed_bytes=2,
    step_seconds=5.0,
    layers=(layer("fc1", 1.0), layer("fc2", 2.0), layer("loss", 0.5)),
    shards=(),
    floor_plan=FloorPlan(width=1, height=1, regions=()),
    busy_seconds={},
)
MEASURED = [
    LayerTime(wait=0.25),
    LayerTime(layer="fc2", compute=1.0, wait=0.5),
    LayerTime(layer="fc1"),
    LayerTime(layer="fc2 backward", compute=2.0, send=0.125),
]


def test_layers_are_compared_in_the_order_of_the_report_and_what_belongs_to_none_is_last() -> None:
    compared = compare_layers(REPORT, MEASURED)
    assert [(each.name, each.predicted, each.difference) for each in compared] == [
        ("fc1", 1.0, -1.0),
        ("fc2", 2.0, 1.0),
        ("", None, None),
    ]
    assert [(each.computed, each.waited, each.sent) for each in compared] == [
        (0.0, 0.0, 0.0),
        (3.0, 0.5, 0.125),
        (0.0, 0.25, 0.0),
    ]


def test_nothing_is_compared_with_the_report_of_another_step() -> None:
    assert compare_layers(None, MEASURED) == ()
    assert compare_layers(REPORT, []) == ()
    assert compare_layers(replace(REPORT, layers=(layer("fc1", 1.0),)), MEASURED) == ()


def test_the_backward_pass_has_the_name_that_the_compiler_gives_it() -> None:
    assert step_comparison._BACKWARD == BACKWARD  # the page does not import the compiler, and so torch
