"""A machine and some plans for the tests of reports."""

from typing import Any

import torch
from compiled_steps import Traced
from torch import nn

from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.report.report import Report
from appliance.compiler.wafer_schedule.memory_plan import MemoryPlan

MACHINE = MachineModel(
    source="stated for tests",
    float32_flops_per_second=1e9,
    half_flops_per_second=4e9,
    bytes_per_second=1e9,
    stream_bytes_per_second=2e9,
    operation_seconds=1e-6,
    message_seconds=1e-5,
)
ROWS, NARROW, WIDE = 12, 8, 64


def memory_of(report: Report) -> MemoryPlan:
    """The memory of a wafer to which weights are streamed."""
    assert isinstance(report.memory, MemoryPlan)
    return report.memory


class Blocks(nn.Module):
    """Layers of different sizes: in, three equal ones in a list, and a wide pair."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NARROW, NARROW)
        self.h = nn.ModuleList(nn.Linear(NARROW, NARROW) for _ in range(3))
        self.up = nn.Linear(NARROW, WIDE)
        self.down = nn.Linear(WIDE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        for layer in self.h:
            x = layer(x).relu()
        return self.down(self.up(x).relu())


def trained_blocks() -> Traced:
    """A step of gradient descent with momentum on Blocks, in float32."""

    def build(model: Any) -> Any:
        kept = [torch.zeros_like(parameter) for parameter in model.parameters()]
        names = [name for name, _ in model.named_parameters()]

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            for parameter in model.parameters():
                parameter.grad = None
            loss.backward()
            with torch.no_grad():
                for parameter, momentum in zip(model.parameters(), kept, strict=True):
                    momentum.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(momentum * 0.1)
            return loss.detach()

        def state(index: int) -> Any:
            return lambda: kept[index]

        return step, {f"state.momentum.{name}": state(index) for index, name in enumerate(names)}

    torch.manual_seed(0)
    return Traced(build, Blocks(), torch.randn(ROWS, NARROW), double=False)
