"""Weights stay on the wafer from the forward to the backward pass, as far as its memory has room."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from compiled_steps import CLUSTERS, Traced
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from appliance.compiler.core.errors import WaferMemoryError
from appliance.compiler.cost.kernel_profile import profile_kernels
from appliance.compiler.wafer_schedule.memory_plan import plan_memory
from wsc.v1 import plan_pb2

WIDTH, LAYERS, ROWS = 384, 6, 12


def trained(layers: Sequence[nn.Module]) -> Traced:
    def build(model: nn.Module) -> object:
        def step(x: torch.Tensor) -> list[torch.Tensor]:
            loss = (model(x) - x).square().sum()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad * 1e-3)
            return [loss.detach()]

        return step

    return Traced(build, nn.Sequential(*layers), batches()[0])  # type: ignore[arg-type]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(3)]


@pytest.fixture(scope="module")
def chain() -> Traced:
    torch.manual_seed(0)
    return trained([layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())])


def times(plan: plan_pb2.Plan) -> list[int]:
    """How often each matrix of weights is received in a step, in the order of the layers."""
    groups = {group.id: group for group in plan.wafer.groups}
    received = Counter(i.receive.group for i in plan.wafer.instructions if i.HasField("receive"))
    sent = Counter(i.send.group for part in plan.memoryx for i in part.instructions if i.HasField("send"))
    found = []
    for group, count in received.items():
        if groups[group].kind == plan_pb2.GROUP_KIND_WEIGHTS and groups[group].nbytes > 0:
            assert sent[group] == count
            found.append(count)
    return found


def needed(plan: plan_pb2.Plan) -> int:
    return plan_memory(plan.wafer, profile_kernels(plan.wafer.kernels), 1 << 40).needed_bytes


def test_with_room_all_are_streamed_once(chain: Traced) -> None:
    plan, *_ = chain.check(batches(), CLUSTERS, seeds=range(4))
    assert times(plan) == [1] * LAYERS
    # The backward pass of the first layer reads no weights, that of the last follows at once.
    assert times(chain.plan(1, drops_weights=True)) == [1, *[2] * (LAYERS - 2), 1]


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_those_of_the_last_layers_stay_where_there_is_room_for_some(room: int) -> None:
    torch.manual_seed(0)
    deep = trained([layer for _ in range(12) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())])
    dropping = deep.plan(1, drops_weights=True)
    twice = sum(count == 2 for count in times(dropping))
    capacity = needed(dropping) + room * WIDTH * WIDTH * 8
    plan, *_ = deep.check(batches(), [(1, 1), (2, 2)], seeds=[0, 1], wafer_memory_bytes=capacity)
    assert needed(plan) <= capacity
    kept = twice - sum(count == 2 for count in times(plan))
    assert kept >= room  # some of the memory at the peak may be free for more
    first = times(plan)[1:]
    assert first == sorted(first, reverse=True), "the weights of the last layers stay"


@settings(max_examples=15)
@given(share=st.floats(0.3, 1.5), wide=st.lists(st.sampled_from([64, 384, 512]), min_size=2, max_size=6))
@pytest.mark.parity
def test_any_memory_gives_the_same_numbers_or_is_refused(share: float, wide: list[int]) -> None:
    torch.manual_seed(0)
    widths = [WIDTH, *wide, WIDTH]
    traced = trained([nn.Linear(a, b, bias=False) for a, b in pairwise(widths)])
    capacity = int(share * needed(traced.plan(1)))
    try:
        traced.plan(1, wafer_memory_bytes=capacity)
    except WaferMemoryError:
        return
    traced.check(batches(), [(1, 1), (2, 2)], wafer_memory_bytes=capacity)
