"""What links between hosts may hold: as much as windows, arenas and queues let be under way, and no more."""

from typing import Any

import pytest
import torch
from compiled_steps import Traced
from torch import nn

from appliance.compiler.cost.link_memory import set_link_bytes
from appliance.compiler.wafer_schedule import arena as arena_layout
from waferbox.limits import MAX_RUN_AHEAD_STEPS
from waferbox.links.grpc_bounds import CHUNK_BYTES, MAX_QUEUED_BYTES, receiving_bytes, sending_bytes
from waferbox.runtime.schedule import WEIGHTS_WINDOW

WIDTH = 400
WEIGHT = WIDTH * WIDTH * 8  # more than a chunk
LAYERS = 12
PASSING = 3 * CHUNK_BYTES  # what gRPC has of one link
SMALL = 1 << 18  # batches, and the loss on its way to SwarmX
LOSSES = sending_bytes(8 * MAX_RUN_AHEAD_STEPS)  # on their way to the coordinator


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@pytest.fixture(scope="module")
def evaluation() -> Traced:
    return Traced(lambda m: lambda x: m(x).sum().detach(), chain(), torch.randn(6, WIDTH, dtype=torch.float64))


@pytest.fixture(scope="module")
def training() -> Traced:
    def build(model: Any) -> Any:
        def step(x: torch.Tensor) -> Any:
            for parameter in model.parameters():
                parameter.grad = None
            loss = model(x).square().sum()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad * 1e-3)
            return loss.detach()

        return step

    return Traced(build, chain(), torch.randn(6, WIDTH, dtype=torch.float64))


def test_an_evaluation_runs_ahead_into_the_next_step(evaluation: Traced) -> None:
    one, two = evaluation.plan(1), evaluation.plan(2)
    window = WEIGHTS_WINDOW * WEIGHT
    for plan, losses in ((one, LOSSES), (two, 0)):
        # The weight that is read, the window as chunks, and as groups.
        assert 0 <= plan.wafer.link_bytes - (WEIGHT + 2 * window + PASSING + losses) < SMALL
        assert plan.memoryx[0].link_bytes == window + PASSING
    assert one.swarmx.link_bytes == one.swarmx.relay_bytes == 0
    # The window, a group that is being put together, and the queues to the wafers.
    assert two.swarmx.link_bytes == (window + WEIGHT + PASSING) + 2 * (window + PASSING) + LOSSES + 2 * (9 + 3) * 8
    assert two.swarmx.relay_bytes == LAYERS * WEIGHT


def test_gradients_are_bounded_by_their_arena(training: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_layout, "SLACK_BYTES", 0)
    one, two, three = (training.plan(num_csx) for num_csx in (1, 2, 3))
    arena = three.swarmx.arena.nbytes
    assert three.swarmx.arena.credited
    child = arena + WEIGHT + PASSING + WEIGHTS_WINDOW * WEIGHT + PASSING
    assert 0 <= three.swarmx.link_bytes - two.swarmx.link_bytes - child < SMALL
    assert one.memoryx[0].link_bytes == three.memoryx[0].link_bytes
    # The arena as chunks, and as groups; the queue to SwarmX.
    assert three.memoryx[0].link_bytes == 2 * arena + PASSING + WEIGHTS_WINDOW * WEIGHT + PASSING


def test_weights_of_the_next_step_come_behind_the_last_gradient(training: Traced) -> None:
    queue = sending_bytes(LAYERS * WEIGHT) + LOSSES
    # In the forward pass: the window is full for the last time when three layers' weights are there, to stay.
    kept = training.plan(1)
    assert 0 <= kept.wafer.link_bytes - ((3 + 2 * WEIGHTS_WINDOW) * WEIGHT + PASSING + queue) < SMALL
    plan = training.plan(1, drops_weights=True)
    # At the beginning of the backward pass: two layers' weights are still to be read, and a window is ahead.
    assert 0 <= plan.wafer.link_bytes - ((2 + 2 * WEIGHTS_WINDOW) * WEIGHT + PASSING + queue) < SMALL
    first = next(i for i in plan.wafer.instructions if i.HasField("receive") and i.receive.group == 1)
    del plan.wafer.instructions[:]
    plan.wafer.instructions.append(first)
    set_link_bytes(plan)
    # A single weight: with nothing to be sent there is a window of steps ahead.
    assert 0 <= plan.wafer.link_bytes - ((1 + 2 * WEIGHTS_WINDOW) * WEIGHT + PASSING) < SMALL
    last = plan.wafer.instructions.add()
    last.send.group = next(group.id for group in plan.wafer.groups if list(group.shards))
    set_link_bytes(plan)
    # Else one step.
    assert 0 <= plan.wafer.link_bytes - ((1 + 2) * WEIGHT + PASSING + sending_bytes(WEIGHT)) < SMALL


def test_a_queue_is_bounded_whatever_is_sent() -> None:
    assert sending_bytes(0) == receiving_bytes(0, 0) == 0
    assert sending_bytes(100) == 400
    assert sending_bytes(1 << 40) == MAX_QUEUED_BYTES + CHUNK_BYTES + PASSING
    assert receiving_bytes(300, 100) == 600
    assert receiving_bytes(3 << 30, 1 << 30) == (6 << 30) + PASSING
    assert receiving_bytes(3 << 30, 1 << 30, at_once=True) == (4 << 30) + PASSING
