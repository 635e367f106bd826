"""Predicts how long a step takes on a cluster, and what limits it, from the plan of the step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from appliance.compiler.artifacts import read_plan
from appliance.compiler.core.errors import BatchError, CompileError
from appliance.compiler.core.progress import progress
from appliance.compiler.core.target import DEFAULT_WAFER_MEMORY_BYTES, MicroBatching, Precision, Target
from appliance.compiler.cost.kernel_profile import profile_kernels
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.wafer_schedule.memory_plan import plan_memory
from waferbox.cirh import CirhError
from waferbox.cirh.text.scanner import MAXIMUM_TEXT
from waferbox.prediction.roles import Trees, run_shard, run_wafer
from waferbox.prediction.simulation import Costs, Rates, SimulatedCluster, fan_outs, predict_costs, tree_levels
from wsc.v1 import plan_pb2

# --- The prediction of a plan -----------------------------------------------------------------------------------------

# Roles run ahead of one another, as far as their credits allow. After three steps they are as far ahead as they get,
# and every further step takes the same time.
WARM_STEPS: Final = 3
MEASURED_STEPS: Final = 4
# A part of the cluster limits the step if it is busy for at least this share of it.
_LIMITING_SHARE: Final = 0.9


class StuckError(RuntimeError):
    """The roles of a plan wait for one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """How busy one part of the cluster is. Wafers and the nodes of a level are alike; of several shards, the busiest.

    Attributes:
        name: the part, such as "wafer compute".
        share: the fraction of a step for which the part is busy.
    """

    name: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted step on one cluster.

    Attributes:
        wafers: number of wafers.
        fan_out: the most children that a SwarmX node may have; 1: a single wafer, without SwarmX nodes.
        swarmx_nodes: number of SwarmX nodes.
        depth: number of levels of SwarmX nodes.
        step_seconds: duration of a step.
        rows: rows of the batch over all wafers.
        rows_per_second: the rows of all steps in a second.
        loads: how busy each part of the cluster is.
    """

    wafers: int
    fan_out: int
    swarmx_nodes: int
    depth: int
    step_seconds: float
    rows: int
    rows_per_second: float
    loads: tuple[RoleLoad, ...]

    @property
    def busiest(self) -> RoleLoad:
        return max(self.loads, key=lambda load: load.share)

    @property
    def limit(self) -> str:
        """Name of the part that limits the step; "dependencies" if none is busy for most of it."""
        busiest = self.busiest
        if busiest.share >= _LIMITING_SHARE:
            return busiest.name
        return f"dependencies (the busiest is {busiest.name}, {busiest.share:.0%} of a step)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePrediction:
    """The predictions for a number of wafers.

    Attributes:
        best: with the SwarmX tree that gives the shortest step; of equal ones, with the fewest nodes.
        tried: with each tree that was tried, by fan-out.
        single: with one wafer.
    """

    best: Prediction
    tried: tuple[Prediction, ...]
    single: Prediction

    @property
    def efficiency(self) -> float:
        """Rows per second, divided by those of one wafer times the number of wafers."""
        return self.best.rows_per_second / (self.best.wafers * self.single.rows_per_second)


def predict(
    plan: plan_pb2.Plan,
    wafers: int,
    fan_out: int,
    rates: Rates,
    costs: Costs | None = None,
    *,
    has_trees: bool = False,
) -> Prediction:
    """Simulates some steps of a plan on a cluster.

    Args:
        plan: a plan for weight streaming. Each predicted wafer gets as many rows as a wafer of the plan.
        wafers: number of wafers of the cluster.
        fan_out: the most children of a SwarmX node.
        rates: rates of the cluster's parts.
        costs: seconds of the plan's kernels; default: computed from the rates.
        has_trees: whether each MemoryX shard has a SwarmX tree of its own, as over several hosts.

    Raises:
        ValueError: the plan is for layer pipelined mode, or there is no tree of that size.
        StuckError: the programs of the plan wait for one another.
    """
    if plan.HasField("pipeline"):
        raise ValueError("a step in layer pipelined mode has one wafer: only weight streaming is predicted")
    progress(f"{wafers:,} wafers, fan-out {fan_out:,}" if wafers > 1 else "one wafer")
    levels = tree_levels(wafers, fan_out)
    num_trees = plan.num_shards if has_trees else 1
    cluster = SimulatedCluster(plan, costs or predict_costs(plan, rates), rates, levels, num_trees)
    trees = Trees(cluster)
    num_steps = WARM_STEPS + MEASURED_STEPS
    cluster.clock.start(run_wafer(cluster, trees, num_steps))
    for shard in range(len(cluster.shards)):
        cluster.clock.start(run_shard(cluster, trees, shard, num_steps))
    cluster.clock.run()
    if len(cluster.step_ends) < num_steps:
        raise StuckError(f"in step {len(cluster.step_ends) + 1} the roles wait for one another")
    seconds = (cluster.step_ends[-1] - cluster.step_ends[WARM_STEPS - 1]) / MEASURED_STEPS
    rows = plan.batch_rows // plan.num_csx * wafers
    return Prediction(
        wafers=wafers,
        fan_out=fan_out,
        swarmx_nodes=num_trees * sum(level.nodes for level in levels),
        depth=len(levels),
        step_seconds=seconds,
        rows=rows,
        rows_per_second=rows / seconds if seconds else math.inf,
        loads=_loads(cluster, num_steps, seconds),
    )


def predict_scaled(plan: plan_pb2.Plan, wafers: int, rates: Rates) -> ScalePrediction:
    """Predicts a step with each SwarmX tree that is worth a try, and with one wafer. Raises as `predict`."""
    costs = predict_costs(plan, rates)
    tried = tuple(predict(plan, wafers, fan_out, rates, costs, has_trees=True) for fan_out in fan_outs(wafers))
    return ScalePrediction(best=min(tried, key=_rank), tried=tried, single=predict(plan, 1, 1, rates, costs))


def predict_scales(plan: plan_pb2.Plan, counts: Iterable[int], rates: Rates) -> list[Prediction]:
    """Predicts a step for each of these numbers of wafers, with its best SwarmX tree. Raises as `predict`."""
    costs = predict_costs(plan, rates)
    return [_best(plan, wafers, rates, costs) for wafers in counts]


def _best(plan: plan_pb2.Plan, wafers: int, rates: Rates, costs: Costs) -> Prediction:
    """The prediction with the best tree. A tree is not simulated if the line of a node alone takes longer."""
    passing = zip(plan.swarmx.groups, plan.swarmx.times, strict=True)
    weights = sum(group.nbytes * times for group, times in passing if group.kind == plan_pb2.GROUP_KIND_WEIGHTS)
    best: Prediction | None = None
    for fan_out in fan_outs(wafers):
        children = max((level.children for level in tree_levels(wafers, fan_out)), default=1)
        if best is None or children * weights / plan.num_shards / rates.link_bytes_per_second < best.step_seconds:
            tried = predict(plan, wafers, fan_out, rates, costs, has_trees=True)
            best = tried if best is None else min(best, tried, key=_rank)
    assert best is not None
    return best


def _rank(prediction: Prediction) -> tuple[float, int]:
    """Shorter steps come first; of equal ones, those with fewer nodes."""
    return prediction.step_seconds, prediction.swarmx_nodes


def _loads(cluster: SimulatedCluster, num_steps: int, step_seconds: float) -> tuple[RoleLoad, ...]:
    """How busy each part is in a step: the mean over all steps, as every step does the same work."""

    def load(name: str, *busy: float) -> RoleLoad:
        share = max(busy, default=0.0) / num_steps / step_seconds if step_seconds else 0.0
        return RoleLoad(name=name, share=share)

    wafer, shards, nodes = cluster.wafer, cluster.shards, [node for tree in cluster.nodes for node in tree]
    return (
        load("wafer compute", wafer.busy_seconds),
        load("a wafer's link, in", wafer.incoming.busy_seconds),
        load("a wafer's link, out", wafer.outgoing.busy_seconds),
        load("MemoryX compute", *(shard.busy_seconds for shard in shards)),
        load("MemoryX's link, in", *(shard.incoming.busy_seconds for shard in shards)),
        load("MemoryX's link, out", *(shard.outgoing.busy_seconds for shard in shards)),
        load("SwarmX compute", *(node.busy_seconds for node in nodes)),
        load("SwarmX's link, in", *(node.incoming.busy_seconds for node in nodes)),
        load("SwarmX's link, out", *(node.outgoing.busy_seconds for node in nodes)),
    )


# --- The plan of a step -----------------------------------------------------------------------------------------------


class PredictionError(ValueError):
    """Raised when a step cannot be predicted. The message says why, and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFor:
    """How a step is compiled.

    Attributes:
        num_csx: number of wafers among which its batch is divided.
        memoryx: number of MemoryX shards.
        wafer_memory_bytes: memory of a wafer.
        half: half precision type, such as "bfloat16"; empty: float32 throughout.
        optimization_level: how much is computed in half precision, 0 to 2.
        half_gradients: whether gradients of weights travel in half precision.
    """

    num_csx: int = 1
    memoryx: int = 1
    wafer_memory_bytes: int = DEFAULT_WAFER_MEMORY_BYTES
    half: str = ""
    optimization_level: int = 1
    half_gradients: bool = False

    def precision(self) -> Precision | None:
        """Raises PredictionError: there is no such precision."""
        try:
            return Precision.of_options(self.half, self.optimization_level, self.half_gradients)
        except ValueError as error:
            raise PredictionError(str(error)) from error


def read_plan_file(file: Path) -> plan_pb2.Plan:
    """Reads a plan. Raises PredictionError: it is damaged, of another version, or for layer pipelined mode."""
    plan = read_plan(file)
    if plan is None:
        raise PredictionError(f"{file} is damaged or of another version; compile the step again")
    if plan.HasField("pipeline"):
        raise PredictionError(f"{file} is for layer pipelined mode, which has one wafer: `waferbox compile-report`")
    return plan


def compiled_for(plan: plan_pb2.Plan) -> CompiledFor:
    """How the step of a plan was compiled."""
    mixed = plan.precision
    return CompiledFor(
        num_csx=plan.num_csx,
        memoryx=plan.num_shards,
        wafer_memory_bytes=plan.wafer.memory_bytes,
        half=plan_pb2.HalfType.Name(mixed.half).removeprefix("HALF_TYPE_").lower()
        if plan.HasField("precision")
        else "",
        optimization_level=mixed.optimization_level if plan.HasField("precision") else 1,
        half_gradients=mixed.half_gradients,
    )


def is_plan_for(plan: plan_pb2.Plan, wanted: CompiledFor) -> bool:
    """Whether a compile would make the plan again, as far as a prediction is concerned."""
    made = compiled_for(plan)
    if replace(made, wafer_memory_bytes=wanted.wafer_memory_bytes) != wanted:
        return False
    if made.wafer_memory_bytes == wanted.wafer_memory_bytes:
        return True
    # What was done for lack of memory may be done otherwise with another; a whole batch that fits is one in either.
    if plan.wafer.micro_batches > 1 or plan.wafer.recomputes:
        return False
    if made.wafer_memory_bytes < wanted.wafer_memory_bytes:
        return True
    memory = plan_memory(plan.wafer, profile_kernels(plan.wafer.kernels), wanted.wafer_memory_bytes)
    return memory.needed_bytes <= wanted.wafer_memory_bytes


def compile_file(file: Path, wanted: CompiledFor, rates: Rates) -> plan_pb2.Plan:
    """Compiles the step in a file, in as large micro-batches as fit.

    Raises:
        PredictionError: the file is not a step in CIRH, or the step cannot be compiled so.
        OSError: the file cannot be read.
    """
    precision = wanted.precision()
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(MAXIMUM_TEXT + 1)
        target = Target(
            num_csx=wanted.num_csx,
            num_shards=wanted.memoryx,
            precision=precision,
            wafer_memory_bytes=wanted.wafer_memory_bytes,
        )
        return compile_in_micro_batches(text, target, MicroBatching(), rates.wafer.model)
    except UnicodeDecodeError as error:
        raise PredictionError(f"{file} is not UTF-8 text: {error}") from error
    except BatchError as error:
        raise PredictionError(
            f"{file}: {error}. Name a number that divides it with --divided-over; each of the wafers then has one such "
            "part, and the batch grows with the wafers"
        ) from error
    except (CirhError, CompileError) as error:
        raise PredictionError(f"{file}: {error}") from error
