"""Helpers for the tests of the compiler: steps traced by the real client, compiled, and run beside plain torch."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from counted_random import CountedRandom
from pipeline_simulator import PipelineSimulation
from plan_simulator import Simulation
from torch import nn
from torch.utils._pytree import tree_leaves

from appliance.compiler import plan as plan_module
from appliance.compiler.cost.kernel_profile import profile_kernels
from appliance.compiler.partition.row_slices import compute_in_slices
from appliance.compiler.pipeline import CompiledStep, Target
from appliance.compiler.plan_check.check import check_plan
from appliance.compiler.wafer_schedule import schedule as schedule_module
from appliance.compiler.wafer_schedule import streams
from appliance.compiler.wafer_schedule.memory_plan import plan_memory
from appliance.compiler.wafer_schedule.schedule import schedule_wafer
from appliance.compiler.wafer_schedule.segment_runs import StepOrder
from cstorch._internal.lowering import lower
from cstorch._internal.tracing import DEVICE, LazyTensor, move_module, trace_step
from cstorch.metrics import metric as metric_module
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module
from wsc.v1 import plan_pb2

BATCH = 12
# (wafers, shards)
CLUSTERS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 3), (4, 2)]

Getters = dict[str, Callable[[], torch.Tensor]]
Step = Callable[[Any], Any]
# Gets the model, moved to the tracing device or plain; returns the step and further states.
Build = Callable[[Any], "Step | tuple[Step, Getters]"]


@contextlib.contextmanager
def one_at_a_time(
    *,
    adds_in_memoryx: bool = False,
    kept_every: tuple[int, ...] = (),
    kept_at_most: int | None = None,
    keeps_weights: bool = True,
) -> Iterator[None]:
    """Micro-batches go through the layers one by one, though there is memory for all.

    adds_in_memoryx: gradients of any size leave the wafer in each round.
    kept_every, kept_at_most, keeps_weights: as of `StepOrder`.
    """

    def schedule(work: Any, sharing: Any, numbers: Any, order: StepOrder, rounds: Any) -> Any:
        order = replace(
            order,
            at_once=1,
            adds_in_memoryx=adds_in_memoryx,
            kept_every=kept_every,
            kept_at_most=kept_at_most,
            keeps_weights=keeps_weights,
        )
        made = schedule_wafer(work, sharing, numbers, order, order.listed_rounds)
        return made if made.is_repeatable else schedule_wafer(work, sharing, numbers, order, order.rounds)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(plan_module, "schedule_wafer", schedule))
        if adds_in_memoryx:
            patches.enter_context(mock.patch.object(streams, "INLINE_BYTES", 0))
        yield


@contextlib.contextmanager
def always_in_slices() -> Iterator[list[str]]:
    """Kernels are computed in slices also where this needs more memory. Yields the texts of those that are."""
    sliced: list[str] = []

    def in_slices(text: str, rows: tuple[tuple[int, int], ...], most: int, *, attends: bool) -> str:
        made = _sliced(text, rows, most, attends=attends)
        if made is None:
            return text
        sliced.append(made)
        return made

    with mock.patch.object(schedule_module, "_in_slices", in_slices):
        yield sliced


# As in the compiler, since layers that are alike have the same kernel, on clusters of any size.
@functools.lru_cache(maxsize=256)
def _sliced(text: str, rows: tuple[tuple[int, int], ...], most: int, *, attends: bool) -> str | None:
    """A kernel that computes a row in slices, if it can be."""
    made = compute_in_slices(parse_module(text), dict(rows), most, attends=attends)
    return None if made is None else print_module(made, locations=False)


class Traced:
    """One step, traced once; compiled for as many clusters as a test likes."""

    def __init__(self, build: Build, model: nn.Module, batch: Any, *, double: bool = True) -> None:
        self.reference = copy.deepcopy(model).double() if double else copy.deepcopy(model)
        self.build = build
        model = copy.deepcopy(self.reference)
        move_module(model)
        with mock.patch.object(metric_module, "current_torch_device", return_value=DEVICE):
            step, states = _built(build, model)
        names = {module: name for name, module in model.named_modules()}
        trace = trace_step(step, batch, states, names, _lazy_outputs)
        self.text = print_module(lower(trace))
        self.initial = {state.name: state.cell.read().clone() for state in trace.states}

    @functools.cached_property
    def step(self) -> CompiledStep:
        return CompiledStep(self.text)

    def plan(self, wafers: int, shards: int = 1, **settings: Any) -> plan_pb2.Plan:
        plan = self.step.plan(Target(num_csx=wafers, num_shards=shards, **settings))
        check_plan(plan)
        return plan

    def expected(self, batches: Sequence[Any]) -> tuple[list[list[torch.Tensor]], dict[str, torch.Tensor]]:
        """What plain torch makes of the global batches: the outputs of each step, and the states after all."""
        step, states = _built(self.build, copy.deepcopy(self.reference))
        outputs = []
        for batch in batches:
            leaves = tree_leaves(step(batch))
            outputs.append([leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return outputs, {name: get().detach() for name, get in states.items() if name in self.initial}

    def check(
        self,
        batches: Sequence[Any],
        clusters: Sequence[tuple[int, int]] = CLUSTERS,
        *,
        rtol: float = 1e-9,
        seeds: Sequence[int] = (1,),
        **settings: Any,
    ) -> list[plan_pb2.Plan]:
        """The simulated cluster and plain torch agree, in each step, in all outputs and states. Returns the plans."""
        outputs, states = self.expected(batches)
        inputs = [[leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)] for batch in batches]
        plans = [self.plan(wafers, shards, **settings) for wafers, shards in clusters]
        for (wafers, shards), plan in zip(clusters, plans, strict=True):
            simulation = simulate(plan, self.initial)
            for seed in seeds:
                simulation.states = {**self.initial}
                results = simulation.run(inputs, seed)
                where = f"on {wafers} wafers and {shards} shards, seed {seed}"
                for number, (result, values) in enumerate(zip(results, outputs, strict=True)):
                    for (name, tensor), value in zip(result.items(), values, strict=True):
                        _close(tensor, value, rtol, f"{name} of step {number} {where}")
                for name, value in states.items():
                    _close(simulation.states[name], value, rtol, f"{name} {where}")
        return plans


class RandomTraced(Traced):
    """A step whose reference draws the cluster's numbers."""

    def expected(self, batches: Any) -> Any:
        build, mode = self.build, CountedRandom()

        def counted(model: Any) -> Any:
            step = build(model)
            assert not isinstance(step, tuple)

            def run(batch: Any) -> Any:
                with mode:
                    result = step(batch)
                mode.next_step()
                return result

            return run

        self.build = counted
        try:
            return super().expected(batches)
        finally:
            self.build = build


def simulate(plan: plan_pb2.Plan, states: Mapping[str, torch.Tensor]) -> Simulation | PipelineSimulation:
    """The simulator of a plan, with these states."""
    return (PipelineSimulation if plan.HasField("pipeline") else Simulation)(plan, states)


def _close(actual: torch.Tensor, expected: torch.Tensor, rtol: float, what: str) -> None:
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if expected.is_floating_point() and finite.numel() else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=rtol * max(scale, 1e-3), equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def _built(build: Build, model: nn.Module) -> tuple[Step, Getters]:
    built = build(model)
    step, more = built if isinstance(built, tuple) else (built, {})
    states: Getters = {}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        states[f"state.model.{name}"] = functools.partial(_member, model, name)
    return step, {**states, **more}


def _member(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    value: torch.Tensor = getattr(model.get_submodule(owner), leaf)
    return value


def _lazy_outputs(result: Any) -> list[tuple[str, torch.Tensor]]:
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, LazyTensor)]
    return [(f"output_{i}", leaf) for i, leaf in enumerate(leaves)]


def loss_and_gradients(model: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    """Runs the backward pass. Returns the loss and the gradients of all parameters, which are cleared."""
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return [loss.detach(), *gradients]


def needed_bytes(plan: plan_pb2.Plan) -> int:
    """The memory of a wafer that a plan needs: with one byte less, the compiler makes another plan or none."""
    return plan_memory(plan.wafer, profile_kernels(plan.wafer.kernels), plan.wafer.memory_bytes).needed_bytes


def kinds(plan: plan_pb2.Plan) -> Mapping[str, int]:
    """How many instructions of each kind the wafer has."""
    found: dict[str, int] = {}
    for instruction in plan.wafer.instructions:
        kind = instruction.WhichOneof("kind") or ""
        found[kind] = found.get(kind, 0) + 1
    return found
