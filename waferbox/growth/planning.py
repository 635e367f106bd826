"""From a module in CIRH to a prediction."""

from dataclasses import dataclass
from pathlib import Path

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.micro_batching import MicroBatching
from appliance.compiler.core.target import Precision, Target
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.sharding.propagate import batch_rows
from appliance.growth.prediction import Growth, grow
from appliance.growth.rates import Rates
from cirh.dialect.errors import CirhError
from cirh.text.parser import parse_module
from cirh.text.scanner import MAXIMUM_TEXT


class PlanningError(ValueError):
    """The file, or the step in it, cannot be planned so. The message says why, and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The cluster to predict."""

    wafers: int
    memoryx: int
    divided_over: int | None  # wafers among which the file's batch is divided; None: all
    wafer_memory_bytes: int
    half: str  # empty: float32 throughout
    optimization_level: int
    half_gradients: bool  # gradients of weights travel in half


def plan_growth(file: Path, wanted: Wanted, rates: Rates) -> Growth:
    """Compiles the step, and plays it.

    Raises:
        PlanningError: see there.
        OSError: the file cannot be read.
    """
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(MAXIMUM_TEXT + 1)
        parts = _parts(text, wanted)
        target = Target(
            num_csx=parts,
            num_shards=wanted.memoryx,
            precision=_precision(wanted),
            wafer_memory_bytes=wanted.wafer_memory_bytes,
        )
        plan = compile_in_micro_batches(text, target, MicroBatching(), rates.wafer.model)
    except UnicodeDecodeError as error:
        raise PlanningError(f"{file} is not a text: {error}") from error
    except (CirhError, CompileError) as error:
        raise PlanningError(f"{file}: {error}") from error
    return grow(plan, wanted.wafers, rates)


def _parts(text: str, wanted: Wanted) -> int:
    """Among how many wafers the file's batch is divided. Each wafer that is predicted has such a part."""
    rows = batch_rows(parse_module(text), 1)
    parts = wanted.wafers if wanted.divided_over is None else wanted.divided_over
    if rows % parts:
        raise PlanningError(
            f"the file's batch of {rows} rows cannot be divided among {parts} wafers: name a number that divides it "
            "with --divided-over; each of the wafers then has one such part, and the batch grows with the wafers"
        )
    return parts


def _precision(wanted: Wanted) -> Precision | None:
    try:
        return Precision.of_options(wanted.half, wanted.optimization_level, wanted.half_gradients)
    except ValueError as error:
        raise PlanningError(str(error)) from error
