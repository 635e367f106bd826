"""What a compile tells of each layer, and whether the step fits a wafer's memory."""

import math

from xdsl.ir import Operation, SSAValue

from appliance.compiler.cut import Cut
from appliance.compiler.errors import CompileError
from appliance.compiler.target import Target
from appliance.compiler.wafer_schedule import WaferSchedule
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
        report.streamed_bytes += sum(load.bundle.nbytes for load in schedule.loads if load.position == position)
        for value in item.inputs:
            if value in states and value not in counted:
                counted.add(value)
                report.parameters += math.prod(types.shape(value))
    return list(reports.values())


def peak_bytes(schedule: WaferSchedule) -> int:
    """The most that a wafer holds at one moment: the batch, what was made and is still read, and weights at hand.

    Weights are at hand from the segment before which they are received, less those that are fetched ahead, to their
    last read before they are received again.
    """
    held = [0] * (len(schedule.work) + 1)

    def hold(value: SSAValue, begin: int, end: int) -> None:
        for position in range(max(begin, 0), end + 1):
            held[position] += types.nbytes(schedule.localiser.type_of(value))

    reads: dict[SSAValue, list[int]] = {}
    for position, item in enumerate(schedule.work):
        for value in item.inputs:
            reads.setdefault(value, []).append(position)
    loads: dict[SSAValue, list[int]] = {}
    for load in schedule.loads:
        for value in load.bundle.values:
            loads.setdefault(value, []).append(load.position)
    for value, positions in loads.items():
        for begin, end in zip(positions, [*positions[1:], len(schedule.work)], strict=True):
            hold(value, begin, max((read for read in reads[value] if begin <= read < end), default=begin))
    sent_at = {value: d.position for d in schedule.departures for value in d.bundle.values}
    made: set[SSAValue] = set()
    for position, item in enumerate(schedule.work):
        for op in item.segment.ops:
            for value in op.results:
                made.add(value)
                hold(value, position, max(reads.get(value, [position])[-1], sent_at.get(value, position)))
    for value, positions in reads.items():
        if value not in made and value not in loads:
            hold(value, 0, positions[-1])
    return max(held)


def check_memory(schedule: WaferSchedule, target: Target) -> int:
    """The peak of a wafer's memory in bytes. CompileError if a wafer has less."""
    peak = peak_bytes(schedule)
    if peak > target.wafer_memory_bytes:
        over = (peak - target.wafer_memory_bytes) / 2**20
        raise CompileError(
            f"the step needs {peak / 2**20:.3g} MiB of a wafer's memory, {over:.3g} MiB more than it has; "
            "use a smaller batch or more wafers (num_csx)"
        )
    return peak
