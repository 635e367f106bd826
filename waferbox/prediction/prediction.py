"""Predicts how long a step takes on a cluster, and what limits it: from a plan, or from a file with a step in CIRH."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import MicroBatching, Precision, Target
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.sharding.propagate import batch_rows
from waferbox.cirh import CirhError
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.scanner import MAXIMUM_TEXT
from waferbox.prediction.roles import Tree, run_shard, run_wafer
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
        fan_out: the most children that a SwarmX node may have.
        swarmx_nodes: number of SwarmX nodes.
        depth: number of levels of SwarmX nodes.
        step_seconds: duration of a step.
        rows_per_second: rows of the batch over all wafers, per second.
        loads: how busy each part of the cluster is.
    """

    wafers: int
    fan_out: int
    swarmx_nodes: int
    depth: int
    step_seconds: float
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


def predict(plan: plan_pb2.Plan, wafers: int, fan_out: int, rates: Rates, costs: Costs | None = None) -> Prediction:
    """Simulates some steps of a plan on a cluster.

    Args:
        plan: a plan for weight streaming. Each predicted wafer gets as many rows as a wafer of the plan.
        wafers: number of wafers of the cluster.
        fan_out: the most children of a SwarmX node.
        rates: rates of the cluster's parts.
        costs: seconds of the plan's kernels; default: computed from the rates.

    Raises:
        ValueError: the plan is for layer pipelined mode, or there is no tree of that size.
        StuckError: the programs of the plan wait for one another.
    """
    if plan.HasField("pipeline"):
        raise ValueError("a step in layer pipelined mode has one wafer: only weight streaming is predicted")
    levels = tree_levels(wafers, fan_out)
    cluster = SimulatedCluster(plan, costs or predict_costs(plan, rates), rates, levels)
    tree = Tree(cluster)
    num_steps = WARM_STEPS + MEASURED_STEPS
    cluster.clock.start(run_wafer(cluster, tree, num_steps))
    for shard in range(len(cluster.shards)):
        cluster.clock.start(run_shard(cluster, tree, shard, num_steps))
    cluster.clock.run()
    if len(cluster.step_ends) < num_steps:
        raise StuckError(f"in step {len(cluster.step_ends) + 1} the roles wait for one another")
    seconds = (cluster.step_ends[-1] - cluster.step_ends[WARM_STEPS - 1]) / MEASURED_STEPS
    rows = plan.batch_rows // plan.num_csx * wafers
    return Prediction(
        wafers=wafers,
        fan_out=fan_out,
        swarmx_nodes=sum(level.nodes for level in levels),
        depth=len(levels),
        step_seconds=seconds,
        rows_per_second=rows / seconds if seconds else math.inf,
        loads=_loads(cluster, num_steps, seconds),
    )


def predict_scaled(plan: plan_pb2.Plan, wafers: int, rates: Rates) -> ScalePrediction:
    """Predicts a step with each SwarmX tree that is worth a try, and with one wafer. Raises as `predict`."""
    costs = predict_costs(plan, rates)
    tried = tuple(predict(plan, wafers, fan_out, rates, costs) for fan_out in fan_outs(wafers))
    best = min(tried, key=lambda each: (each.step_seconds, each.swarmx_nodes))
    return ScalePrediction(best=best, tried=tried, single=predict(plan, 1, 2, rates, costs))


def _loads(cluster: SimulatedCluster, num_steps: int, step_seconds: float) -> tuple[RoleLoad, ...]:
    """How busy each part is in a step: the mean over all steps, as every step does the same work."""

    def load(name: str, *busy: float) -> RoleLoad:
        share = max(busy) / num_steps / step_seconds if step_seconds else 0.0
        return RoleLoad(name=name, share=share)

    wafer, shards, nodes = cluster.wafer, cluster.shards, cluster.nodes
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


# --- The prediction of a file -----------------------------------------------------------------------------------------


class PredictionError(ValueError):
    """Raised when the step in a file cannot be predicted. The message says why, and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSizes:
    """The cluster to predict, and how the step is compiled for it.

    Attributes:
        wafers: number of wafers.
        memoryx: number of MemoryX shards.
        divided_over: number of wafers among which the file's batch is divided; None: all wafers.
        wafer_memory_bytes: memory of a wafer.
        half: half precision type, such as "bfloat16"; empty: float32 throughout.
        optimization_level: how much is computed in half precision, 0 to 2.
        half_gradients: whether gradients of weights travel in half precision.
    """

    wafers: int
    memoryx: int
    divided_over: int | None
    wafer_memory_bytes: int
    half: str
    optimization_level: int
    half_gradients: bool


def predict_clusters(file: Path, wanted: ClusterSizes, rates: Rates) -> ScalePrediction:
    """Compiles the step in a file and predicts it.

    Raises:
        PredictionError: the file is not a step in CIRH, or the step cannot be compiled so.
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
        raise PredictionError(f"{file} is not UTF-8 text: {error}") from error
    except (CirhError, CompileError) as error:
        raise PredictionError(f"{file}: {error}") from error
    return predict_scaled(plan, wanted.wafers, rates)


def _parts(text: str, wanted: ClusterSizes) -> int:
    """The number of wafers among which the file's batch is divided. Each predicted wafer gets one such part."""
    rows = batch_rows(parse_module(text), 1)
    parts = wanted.wafers if wanted.divided_over is None else wanted.divided_over
    if rows % parts:
        raise PredictionError(
            f"the file's batch of {rows} rows cannot be divided among {parts} wafers: name a number that divides it "
            "with --divided-over; each of the wafers then has one such part, and the batch grows with the wafers"
        )
    return parts


def _precision(wanted: ClusterSizes) -> Precision | None:
    try:
        return Precision.of_options(wanted.half, wanted.optimization_level, wanted.half_gradients)
    except ValueError as error:
        raise PredictionError(str(error)) from error
