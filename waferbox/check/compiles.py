"""What the compiler says of a checked step: for several wafers, in the memory of a machine, and how long it takes."""

from dataclasses import dataclass
from pathlib import Path

from appliance.compiler.core.errors import BatchError, CompileError, WaferMemoryError
from appliance.compiler.core.target import MicroBatching, Precision, Target
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.report.builder import make_report
from appliance.compiler.report.report import Report
from waferbox.checked_run.record import Program
from waferbox.cirh import CirhError
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import func_of
from waferbox.cirh.dialect.types import nbytes
from waferbox.cirh.text.parser import parse_module
from waferbox.prediction.machines import Machine
from waferbox.prediction.prediction import Prediction, predict_scales
from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compile of a step for a number of wafers.

    Attributes:
        wafers: number of wafers.
        refusal: why there is no plan; empty: there is one.
        is_memory: whether the memory of a wafer is the reason.
        is_batch: whether the reason is a batch that cannot be divided among the wafers.
        plan: the plan.
        report: its report.
        prediction: the predicted step; None: it was not predicted.
    """

    wafers: int
    refusal: str = ""
    is_memory: bool = False
    is_batch: bool = False
    plan: plan_pb2.Plan | None = None
    report: Report | None = None
    prediction: Prediction | None = None


def largest_value(program: Program) -> tuple[str, int]:
    """Returns the line of the operation with the largest result in a step, and the bytes of the result."""
    line, most = "", 0
    for operation in func_of(parse_module(Path(program.path).read_text(encoding="utf-8"))).block.ops:
        source = source_of(operation)
        for result in operation.results if source.file else ():
            if nbytes(result) > most:
                line, most = source.place, nbytes(result)
    return line, most


def compile_for(program: Program, wafers: int, machine: Machine) -> Compiled:
    """Compiles a step for some wafers of a machine, in as large micro-batches as fit, and predicts its time."""
    text = Path(program.path).read_text(encoding="utf-8")
    try:
        target = Target(
            num_csx=wafers,
            num_shards=1,
            precision=Precision.of_options(program.half, program.optimization_level, program.half_gradients),
            wafer_memory_bytes=machine.wafer_memory_bytes,
        )
        plan = compile_in_micro_batches(text, target, MicroBatching(), machine.rates.wafer.model)
    except WaferMemoryError as error:
        return Compiled(wafers=wafers, refusal=str(error), is_memory=True)
    except (CompileError, CirhError) as error:
        return Compiled(wafers=wafers, refusal=str(error), is_batch=isinstance(error, BatchError))
    report = make_report(plan, "", machine.rates.wafer.model())
    (prediction,) = predict_scales(plan, [wafers], machine.rates)
    return Compiled(wafers=wafers, plan=plan, report=report, prediction=prediction)
