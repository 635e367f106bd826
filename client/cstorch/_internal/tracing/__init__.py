"""Tracing: tensors on the device type `lazy`, and the recording of one whole step.

Outside a traced step an operation on a device tensor runs at once on the CPU (`eager`), on the bytes of a `Cell`: in
memory, in a spool file, or on the cluster. Within `trace_step` every ATen operation is recorded (`recording.recorder`)
while meta tensors give the shapes; then the recording becomes a graph of pure functions (`recording.functional`).
"""

from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.context import is_tracing, metric_operations, name_operations, purpose
from cstorch._internal.tracing.device.dispatch import device_scope
from cstorch._internal.tracing.device.registration import XlaName, register
from cstorch._internal.tracing.provenance import user_line
from cstorch._internal.tracing.random_counter import COUNTER, random_counter
from cstorch._internal.tracing.recording.functional import functionalize
from cstorch._internal.tracing.recording.operation_checks import alias_rule
from cstorch._internal.tracing.recording.step import OpenTrace, trace_step
from cstorch._internal.tracing.recording.trace import Argument, Call, InputInfo, OutputInfo, Ref, StateInfo, Trace
from cstorch._internal.tracing.step_values import StepAtHand, check_known, enter_loop, is_in_body, is_of_step, settle
from cstorch._internal.tracing.tensor import (
    DEVICE,
    LazyTensor,
    Source,
    StepValue,
    cell_of,
    from_cpu,
    move_module,
    new_tensor,
)

__all__ = [
    "COUNTER",
    "DEVICE",
    "Argument",
    "Call",
    "Cell",
    "InputInfo",
    "LazyTensor",
    "OpenTrace",
    "OutputInfo",
    "Ref",
    "Source",
    "StateInfo",
    "StepAtHand",
    "StepValue",
    "Trace",
    "XlaName",
    "alias_rule",
    "cell_of",
    "check_known",
    "device_scope",
    "enter_loop",
    "from_cpu",
    "functionalize",
    "is_in_body",
    "is_of_step",
    "is_tracing",
    "metric_operations",
    "move_module",
    "name_operations",
    "new_tensor",
    "purpose",
    "random_counter",
    "settle",
    "trace_step",
    "user_line",
]

register()
