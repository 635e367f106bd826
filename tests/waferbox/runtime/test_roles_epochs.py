"""Compiled steps on real roles, in one epoch and in two: outputs and states are the same to the bit."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Traced, one_at_a_time
from link_pairs import raise_defect
from memoryx_nodes import memoryx_node
from role_rig import DEADLINE, AttachedNode, FakeManagement, SmallJob, StateClient, Topology
from torch import nn
from wafer_nodes import wafer_node

from appliance.compiler.wafer_schedule import arena
from appliance.compiler.wafer_schedule.segment_runs import StepOrder
from appliance.coordinator.execution.results import OutputCallbacks, Results
from cstorch._internal.state import Registry, named_getters
from cstorch.optim import AdamW
from swarmx.swarmx_program import SwarmXJob
from waferbox import roles
from waferbox.links.elements import torch_dtype
from waferbox.runtime.node import Node, NodeSettings
from waferbox.runtime.schedule import StepSchedule
from waferbox.states.state_memory import StateSettings
from wsc.v1 import node_pb2, plan_pb2

pytestmark = pytest.mark.parity

NUM_STEPS, ACTIVATION_STEPS = 11, 3
States = dict[str, torch.Tensor]
Outputs = dict[int, list[bytes]]  # by step of the execution


@dataclass(frozen=True)
class CompiledPlan:
    """A plan of the compiler, in the form of a SmallPlan."""

    plan: plan_pb2.Plan

    @property
    def num_wafers(self) -> int:
        return self.plan.num_csx

    @property
    def groups(self) -> Sequence[plan_pb2.Group]:
        return self.plan.wafer.groups

    def memoryx(self, shard: int) -> plan_pb2.MemoryXPlan:
        return self.plan.memoryx[shard]

    def swarmx(self) -> plan_pb2.SwarmXPlan:
        return self.plan.swarmx

    def wafer(self) -> plan_pb2.WaferPlan:
        return self.plan.wafer

    def batch(self, wafer: int, step: int) -> Sequence[torch.Tensor]:
        """A wafer's micro-batches of a step."""
        rows = self.plan.worker.local_rows
        x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return x[wafer * rows : (wafer + 1) * rows].split(rows // self.plan.worker.micro_batches)


@pytest.fixture(scope="module")
def traced() -> Traced:
    """With random numbers, moments, and a count of steps."""

    def build(model: Any) -> Any:
        registry = Registry()
        optimizer = AdamW(model.parameters(), lr=0.01)
        registry.register("optimizer", optimizer)

        def step(x: Any) -> Any:
            y = model(x)
            loss = y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach(), y.detach()

        return step, dict(named_getters(registry))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 700), nn.Tanh(), nn.Dropout(0.25), nn.Linear(700, 5))
    return Traced(build, model, torch.randn(BATCH, 6, dtype=torch.float64))


@pytest.fixture
def make_nodes() -> Iterator[Callable[[int, int], Topology]]:
    with ExitStack() as stack:
        management = FakeManagement()
        stack.callback(management.close)
        settings = NodeSettings(management=management.address)

        def attach(node: Node, name: str, index: int) -> AttachedNode:
            node.start()
            stack.callback(node.close)
            attached = AttachedNode(node.address, name, index, node_pb2.LANE_SHARED_MEMORY)
            stack.callback(attached.close)
            return attached

        def make(wafers: int, shards: int) -> Topology:
            return Topology(
                [attach(memoryx_node(management.address, StateSettings()), f"memoryx-{i}", i) for i in range(shards)],
                [attach(Node(roles.SWARMX, settings, SwarmXJob), "swarmx-0", 0)] if wafers > 1 else [],
                [attach(wafer_node(settings), f"wafer-{i}", i) for i in range(wafers)],
            )

        yield make


class Collected:
    """Takes the outputs as the coordinator does, and as a client that consumes at once."""

    def __init__(self, plan: plan_pb2.Plan, schedule: StepSchedule, links: Any) -> None:
        self.outputs: Outputs = {}
        self.losses: dict[int, float] = {}
        self._last = schedule.done_steps + schedule.num_steps if schedule.num_steps else 0
        self._complete = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.results = self._run(self._open(plan, schedule, links))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE)

    async def _open(self, plan: plan_pb2.Plan, schedule: StepSchedule, links: Any) -> Results:
        callbacks = OutputCallbacks(on_outputs=self._take, on_failure=raise_defect, on_scalars=self._see)
        return Results(plan, schedule, links, callbacks)

    def close(self) -> None:
        self._run(self.results.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait(self) -> Outputs:
        if self._last:
            assert self._complete.wait(DEADLINE)
        return self.outputs

    def _take(self, seconds: float) -> None:
        if seconds:
            self._loop.call_later(seconds, self._take, 0.0)
        elif (batch := self.results.take()) is not None:
            self.outputs |= {step.step: list(step.tensors) for step in batch.steps}
            self.results.consumed(batch.steps[-1].step)

    def _see(self, step: int, values: Mapping[str, float]) -> None:
        """Of the last step too, and behind its outputs."""
        self.losses[step] = next(iter(values.values()))
        if step == self._last:
            self._complete.set()


def run_epoch(plan: plan_pb2.Plan, nodes: Topology, states: States, num_steps: int, done_steps: int) -> Outputs:
    """On new nodes, from these states, which become those after the last step."""
    job = SmallJob(CompiledPlan(plan), nodes, node_pb2.LANE_SHARED_MEMORY)
    outputs = None
    try:
        job.load(1)
        for node, part in zip(nodes.memoryx, plan.memoryx, strict=True):
            client = StateClient(node, job.lane)
            client.write({slot.name: states[slot.name] for slot in part.states})
            client.close()
        start = node_pb2.Start(
            num_steps=num_steps, done_steps=done_steps, activation_steps=ACTIVATION_STEPS, run_ahead_steps=2
        )
        schedule = StepSchedule.from_start(start)
        links = {
            node_pb2.LINK_PURPOSE_SWARMX if nodes.swarmx else node_pb2.LINK_PURPOSE_WAFER: job.links["outputs", 0],
            node_pb2.LINK_PURPOSE_SHARD: job.links["memoryx", 0],
        }
        outputs = Collected(plan, schedule, links)
        outputs.results.start()
        job.start(1, num_steps, done_steps=done_steps, activation_steps=ACTIVATION_STEPS, run_ahead_steps=2)
        for node in nodes.all:
            node.expect("finished")
        for node, part in zip(nodes.memoryx, plan.memoryx, strict=True):
            for slot in part.states:
                client = StateClient(node, job.lane)
                dtype = torch_dtype(slot.type.element_type)
                states.update(client.read({slot.name: tuple(slot.type.shape)}, dtype=dtype))
                client.close()
        assert outputs.losses.keys() <= outputs.wait().keys()
        return outputs.outputs
    finally:
        if outputs is not None:
            outputs.close()
        job.close()


@pytest.fixture(scope="module")
def in_one_epoch() -> dict[tuple[int, int, int], tuple[plan_pb2.Plan, Outputs, States]]:
    """Plans with the outputs and the states of one epoch, by cluster, as far as a test has run it."""
    return {}


@pytest.mark.parametrize("done_steps", [3, 7, 11])
@pytest.mark.parametrize(("wafers", "shards", "micro_batches"), [(1, 1, 1), (1, 2, 3), (2, 2, 1), (2, 2, 3)])
def test_two_epochs_are_one(
    traced: Traced,
    in_one_epoch: dict[tuple[int, int, int], tuple[plan_pb2.Plan, Outputs, States]],
    make_nodes: Callable[[int, int], Topology],
    wafers: int,
    shards: int,
    micro_batches: int,
    done_steps: int,
) -> None:
    cluster = (wafers, shards, micro_batches)
    if cluster not in in_one_epoch:
        plan, expected_states = traced.plan(wafers, shards, micro_batches=micro_batches), dict(traced.initial)
        expected = run_epoch(plan, make_nodes(wafers, shards), expected_states, NUM_STEPS, 0)
        in_one_epoch[cluster] = plan, expected, expected_states
    plan, expected, expected_states = in_one_epoch[cluster]
    assert sorted(expected) == [3, 6, 9, 11]
    states = dict(traced.initial)
    run_epoch(plan, make_nodes(wafers, shards), states, done_steps, 0)
    outputs = run_epoch(plan, make_nodes(wafers, shards), states, NUM_STEPS, done_steps)
    assert outputs == {step: tensors for step, tensors in expected.items() if step > done_steps}
    assert states.keys() == expected_states.keys()
    for name, value in expected_states.items():
        assert torch.equal(states[name], value), name
        assert not torch.equal(value, traced.initial[name]), name


@pytest.mark.parametrize("adds_in_memoryx", [False, True])
def test_rounds_in_a_loop_are_those_that_are_listed(
    traced: Traced,
    make_nodes: Callable[[int, int], Topology],
    monkeypatch: pytest.MonkeyPatch,
    adds_in_memoryx: bool,
) -> None:
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)
    with one_at_a_time(adds_in_memoryx=adds_in_memoryx):
        looped = traced.plan(2, 2, micro_batches=6)
        monkeypatch.setattr(StepOrder, "listed_rounds", StepOrder.rounds)
        listed = traced.plan(2, 2, micro_batches=6)
    assert looped.wafer.loop.times == 4
    assert looped.wafer.arena.credited == adds_in_memoryx
    assert set(looped.wafer.looped_parts) > set(looped.wafer.looped_parts) & set(looped.wafer.number_values)
    assert not listed.wafer.HasField("loop")
    results = []
    for plan in (looped, listed):
        states = dict(traced.initial)
        results.append((run_epoch(plan, make_nodes(2, 2), states, NUM_STEPS, 0), states))
    (outputs, states), (expected, expected_states) = results
    assert outputs == expected
    for name, value in expected_states.items():
        assert torch.equal(states[name], value), name
