"""Tracing: tensors on the device type `lazy`, and the recording of one whole step.

Outside a traced step an operation on a device tensor runs at once on the CPU (`eager`), on bytes that a `Cell` keeps in
memory, in a spool file, or on the cluster. Within `trace_step` every ATen operation is recorded (`recorder`) while
shapes are worked out on meta tensors; afterwards the recording becomes a graph of pure functions (`functional`).
"""

from cstorch.tracing.context import is_tracing, name_operations
from cstorch.tracing.device.modes import device_scope
from cstorch.tracing.device.registration import register
from cstorch.tracing.device.xla_name import XlaName
from cstorch.tracing.provenance import user_line
from cstorch.tracing.recording.aliases import alias_rule
from cstorch.tracing.recording.functional import functionalize
from cstorch.tracing.recording.parts import Argument, Call, Ref
from cstorch.tracing.recording.step import OpenTrace, trace_step
from cstorch.tracing.recording.trace import InputInfo, OutputInfo, StateInfo, Trace
from cstorch.tracing.tensors.cell import Cell
from cstorch.tracing.tensors.move import move_module
from cstorch.tracing.tensors.random_counter import COUNTER, random_counter
from cstorch.tracing.tensors.step_value import Source, StepValue
from cstorch.tracing.tensors.step_values import StepAtHand, check_known, enter_loop, is_in_body, is_of_step, settle
from cstorch.tracing.tensors.tensor import DEVICE, LazyTensor, cell_of, from_cpu, new_tensor

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
    "move_module",
    "name_operations",
    "new_tensor",
    "random_counter",
    "settle",
    "trace_step",
    "user_line",
]

register()
