"""The measured time of a wafer's step beside the predicted one, whole and by layer, and the parts of the difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from appliance.page.compile_report import CompileReport
from appliance.page.job_view import RoleSplit
from waferbox import roles
from wsc.v1 import observation_pb2

_COMPUTE: Final = "compute"
_BACKWARD: Final = " backward"  # ends the name of a layer's part in the backward pass; see the compiler's layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTime:
    """A part of a wafer's step. All times in seconds; the difference is what is measured more than predicted."""

    name: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        return self.measured - self.predicted


def compare_step(report: CompileReport | None, splits: Sequence[RoleSplit]) -> Sequence[ComparedTime]:
    """Returns the parts of a wafer's step, then the whole step; nothing where one of the two sides is unknown.

    In layer pipelined mode the regions of a wafer compute at the same time, so there are no parts that add up.
    """
    wafer = next((split for split in splits if split.role == roles.WAFER.name), None)
    if report is None or wafer is None or report.busy_seconds:
        return ()
    computing = sum(layer.seconds for layer in report.layers)
    computed = sum(part.seconds for part in wafer.parts if part.name == _COMPUTE)
    waiting = "waiting for weights and input, sending gradients"
    return (
        ComparedTime(name="computing", predicted=computing, measured=computed),
        ComparedTime(name=waiting, predicted=report.step_seconds - computing, measured=wafer.seconds - computed),
        ComparedTime(name="the step", predicted=report.step_seconds, measured=wafer.seconds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLayer:
    """A layer's part of a wafer's step, forward and backward together, in seconds.

    Attributes:
        name: of the layer; empty: what belongs to none.
        predicted: of computing; None: the report has no such layer.
        computed: as measured, like the next two.
        waited: for its weights.
        sent: spent on sending its gradients.
    """

    name: str
    predicted: float | None
    computed: float
    waited: float
    sent: float

    @property
    def difference(self) -> float | None:
        """What is computed for longer than predicted."""
        return None if self.predicted is None else self.computed - self.predicted


def compare_layers(
    report: CompileReport | None, measured: Sequence[observation_pb2.LayerTime]
) -> Sequence[ComparedLayer]:
    """Returns the layers in the order of the report, then what belongs to none; nothing for another step's report."""
    if report is None or not measured:
        return ()
    predicted = {layer.layer: layer.seconds for layer in report.layers}
    spent: dict[str, list[float]] = {}
    for each in measured:
        seconds = spent.setdefault(each.layer.removesuffix(_BACKWARD), [0.0, 0.0, 0.0])
        seconds[:] = map(sum, zip(seconds, (each.compute, each.wait, each.send), strict=True))
    if not spent.keys() - {""} <= predicted.keys():
        return ()
    return [
        ComparedLayer(name=name, predicted=predicted.get(name), computed=compute, waited=wait, sent=send)
        for name in [*predicted, ""]
        if name in spent
        for compute, wait, send in [spent[name]]
    ]
