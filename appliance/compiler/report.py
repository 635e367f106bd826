"""What a compile tells of each layer, and whether the step fits a wafer's memory."""

import math
from collections.abc import Sequence

from xdsl.ir import Operation, SSAValue

from appliance.compiler.cut import Cut
from appliance.compiler.errors import CompileError
from appliance.compiler.target import Target
from appliance.compiler.wafer_schedule import WaferSchedule, Work
from cirh import types
from cirh.attributes import attrs
from cirh.graph import func_of
from wsc.v1 import plan_pb2

_PRODUCTS = {"cirh.MatMul": (0, 1), "aten.mm": (0, 1), "aten.bmm": (0, 1), "aten.addmm": (1, 2), "aten.baddbmm": (1, 2)}


def flops(op: Operation) -> int:
    """Floating point operations: 2mnk for a product, one for each element of a result otherwise."""
    product = _PRODUCTS.get(op.name)
    if product is None:
        return sum(math.prod(types.shape(result)) for result in op.results)
    left = types.shape(op.operands[product[0]])
    inner = left[-2] if op.name == "cirh.MatMul" and attrs(op).get("transpose_a") else left[-1]
    return 2 * math.prod(types.shape(op.results[0])) * inner


def layer_reports(cut: Cut, schedule: WaferSchedule) -> list[plan_pb2.LayerReport]:
    """One line per layer, forward and backward together, for the global batch."""
    arguments = func_of(cut.module).block.args
    states = {arguments[state.argument] for state in cut.names.states}
    reports: dict[str, plan_pb2.LayerReport] = {}
    counted: set[SSAValue] = set()
    for position, item in enumerate(schedule.work):
        layer = item.segment.layer or "model"
        report = reports.setdefault(layer, plan_pb2.LayerReport(layer=layer))
        report.flops += sum(flops(op) for op in item.segment.ops)
        report.activation_bytes += sum(types.nbytes(schedule.localiser.type_of(value)) for value in item.outputs)
        report.streamed_bytes += sum(bundle.nbytes for load, bundle in schedule.weights if load == position)
        for value in item.inputs:
            if value in states and value not in counted:
                counted.add(value)
                report.parameters += math.prod(types.shape(value))
    return list(reports.values())


def peak_bytes(schedule: WaferSchedule) -> int:
    """The most that a wafer holds at one moment: the batch, activations that are read later, and weights at hand."""
    last = {value: position for position, item in enumerate(schedule.work) for value in item.inputs}
    live = sum(types.nbytes(schedule.localiser.type_of(v)) for v in _from_outside(schedule.work) if v in last)
    peak = live
    for position, item in enumerate(schedule.work):
        inside = sum(
            types.nbytes(schedule.localiser.type_of(result)) for op in item.segment.ops for result in op.results
        )
        peak = max(peak, live + inside)
        live += sum(types.nbytes(schedule.localiser.type_of(v)) for v in item.outputs if last.get(v, -1) > position)
        ending = {value for value in item.inputs if last[value] == position}
        live -= sum(types.nbytes(schedule.localiser.type_of(value)) for value in ending)
    return peak


def _from_outside(work: Sequence[Work]) -> list[SSAValue]:
    made = {value for item in work for value in item.outputs}
    return list(dict.fromkeys(value for item in work for value in item.inputs if value not in made))


def check_memory(schedule: WaferSchedule, target: Target) -> int:
    """The peak of a wafer's memory in bytes. CompileError if a wafer has less."""
    peak = peak_bytes(schedule)
    if peak > target.wafer_memory_bytes:
        over = (peak - target.wafer_memory_bytes) / 2**20
        raise CompileError(
            f"the step needs {peak / 2**20:.0f} MiB of a wafer's memory, {over:.0f} MiB more than it has; "
            "use a smaller batch or more wafers (num_csx)"
        )
    return peak
