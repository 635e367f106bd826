"""From a step in CIRH to what it is predicted to take on a cluster, and what it waits for."""

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

# --- What a step of a plan is predicted to take on a cluster, and what it waits for -----------------------------------


WARM_STEPS: Final = 3  # until all that runs ahead is as far ahead as it can be
MEASURED_STEPS: Final = 4
_LIMITING_SHARE: Final = 0.9  # busy for so much of a step, a part of the cluster is what limits it


class StuckError(RuntimeError):
    """The roles of a plan wait for one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy one part of the cluster is: of some that are alike, each; of several shards, the busiest."""

    name: str
    share: float  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One cluster."""

    wafers: int
    fan_out: int
    swarmx_nodes: int
    depth: int  # levels of SwarmX
    step_seconds: float
    rows_per_second: float
    loads: tuple[Load, ...]

    @property
    def busiest(self) -> Load:
        return max(self.loads, key=lambda load: load.share)

    @property
    def limit(self) -> str:
        """What a step takes its time for."""
        busiest = self.busiest
        if busiest.share >= _LIMITING_SHARE:
            return busiest.name
        return f"dependencies (the busiest is {busiest.name}, {busiest.share:.0%} of a step)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePrediction:
    """A number of wafers with the best tree, beside the other trees, and beside one wafer."""

    best: Prediction
    tried: tuple[Prediction, ...]  # by fan-out; of equal ones that with fewer nodes is the best
    single: Prediction

    @property
    def efficiency(self) -> float:
        """Rows a second, of as many times those of one wafer."""
        return self.best.rows_per_second / (self.best.wafers * self.single.rows_per_second)


def predict(plan: plan_pb2.Plan, wafers: int, fan_out: int, rates: Rates, costs: Costs | None = None) -> Prediction:
    """Plays some steps. Each wafer has the rows that the plan gives one.

    Args:
        plan: for weight streaming.
        costs: of its kernels, if they are known otherwise than by the rates.

    Raises:
        ValueError: the plan is of a pipelined wafer, or the tree cannot be.
        StuckError: the plan does not hold together.
    """
    if plan.HasField("pipeline"):
        raise ValueError("a step in layer pipelined mode has one wafer, and does not grow")
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


def grow(plan: plan_pb2.Plan, wafers: int, rates: Rates) -> ScalePrediction:
    """With the best of the trees that are worth a try. Raises as `predict`."""
    costs = predict_costs(plan, rates)
    tried = tuple(predict(plan, wafers, fan_out, rates, costs) for fan_out in fan_outs(wafers))
    best = min(tried, key=lambda each: (each.step_seconds, each.swarmx_nodes))
    return ScalePrediction(best=best, tried=tried, single=predict(plan, 1, 2, rates, costs))


def _loads(cluster: SimulatedCluster, num_steps: int, step_seconds: float) -> tuple[Load, ...]:
    """All steps do the same, so what was done in all of them is shared among them."""

    def load(name: str, *busy: float) -> Load:
        share = max(busy) / num_steps / step_seconds if step_seconds else 0.0
        return Load(name=name, share=share)

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


# --- From a module in CIRH to a prediction ----------------------------------------------------------------------------


class PredictionError(ValueError):
    """The file, or the step in it, cannot be planned so. The message says why, and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSizes:
    """The cluster to predict."""

    wafers: int
    memoryx: int
    divided_over: int | None  # wafers among which the file's batch is divided; None: all
    wafer_memory_bytes: int
    half: str  # empty: float32 throughout
    optimization_level: int
    half_gradients: bool  # gradients of weights travel in half


def predict_clusters(file: Path, wanted: ClusterSizes, rates: Rates) -> ScalePrediction:
    """Compiles the step, and plays it.

    Raises:
        PredictionError: see there.
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
        raise PredictionError(f"{file} is not a text: {error}") from error
    except (CirhError, CompileError) as error:
        raise PredictionError(f"{file}: {error}") from error
    return grow(plan, wanted.wafers, rates)


def _parts(text: str, wanted: ClusterSizes) -> int:
    """Among how many wafers the file's batch is divided. Each wafer that is predicted has such a part."""
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
