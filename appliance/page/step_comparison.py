"""The measured time of a wafer's step beside the predicted one, and the parts of the difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from appliance.page.compile_report import CompileReport
from appliance.page.job_view import RoleSplit
from waferbox import roles

_COMPUTE: Final = "compute"


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
