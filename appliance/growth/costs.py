"""How long the kernels of a plan take, by the rates of who runs them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from appliance.compiler.cost.kernel_profile import loop_time, operations_time
from appliance.compiler.cost.machine_model import MachineModel
from appliance.growth.rates import Rates
from cirh.text.parser import parse_module
from lair.lower import NotLowered, lower
from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of each kernel, by its number: of the wafers, and of each shard."""

    wafer: Mapping[int, float]
    memoryx: tuple[Mapping[int, float], ...]


def predict_costs(plan: plan_pb2.Plan, rates: Rates) -> Costs:
    """By arithmetic and bytes (`MachineModel`). What MemoryX does in a loop is done in one pass."""
    wafer, memoryx = rates.wafer.model(), rates.memoryx.model()
    known: dict[str, float] = {}  # shards have many kernels in common
    return Costs(
        wafer={kernel.id: operations_time(parse_module(kernel.cirh), wafer) for kernel in plan.wafer.kernels},
        memoryx=tuple(_shard_costs(part.kernels, memoryx, known) for part in plan.memoryx),
    )


def _shard_costs(
    kernels: Iterable[plan_pb2.Kernel], machine: MachineModel, known: dict[str, float]
) -> Mapping[int, float]:
    for kernel in kernels:
        if kernel.cirh not in known:
            known[kernel.cirh] = _update_time(kernel.cirh, machine)
    return {kernel.id: known[kernel.cirh] for kernel in kernels}


def _update_time(text: str, machine: MachineModel) -> float:
    module = parse_module(text)
    try:
        lower(module)
    except NotLowered:
        return operations_time(module, machine)
    return loop_time(module, machine)
