"""Values that a wafer's kernels write results over: nothing shares their memory, and nothing reads them afterwards.

A kernel that reuses memory can join the gradient of a layer's input where the gradient of its output is, slice by slice
(`waferbox/cirh/execution/memory_reuse.py`). A wafer then needs one of the two in a layer's backward pass.
"""

from collections.abc import Mapping

from appliance.compiler.cost.kernel_profile import KernelProfile
from wsc.v1 import plan_pb2


def add_overwritten(plan: plan_pb2.WaferPlan, profiles: Mapping[int, KernelProfile]) -> None:
    """Adds to each Run the inputs over which its kernel writes results.

    Args:
        plan: a wafer's plan, whose Runs name the values that they drop.
        profiles: the profiles of its kernels, by number.
    """
    if not any(profile.reuses_memory for profile in profiles.values()):
        return
    runs = [instruction.run for instruction in plan.instructions if instruction.HasField("run")]
    travelling = {member.value for group in plan.groups for member in group.members}
    own = _values_of_their_own(runs, profiles) - travelling - {joined.value for joined in plan.joined}
    for run in runs:
        free = own.intersection(run.drops).difference(run.outputs)
        inputs = frozenset(position for position, value in enumerate(run.inputs) if value in free)
        if inputs:
            results = frozenset(position for position, value in enumerate(run.outputs) if value not in travelling)
            run.overwritten.extend(profiles[run.kernel].overwritten(inputs, results))


def _values_of_their_own(runs: list[plan_pb2.Run], profiles: Mapping[int, KernelProfile]) -> set[int]:
    """The values that kernels make, and whose memory no other value shares at any time."""
    made: set[int] = set()
    shared: set[int] = set()
    for run in runs:
        profile = profiles[run.kernel]
        for position, value in enumerate(run.outputs):
            (made if position in profile.own_results else shared).add(value)
        shared.update(run.inputs[position] for position in profile.shown_arguments)
    return made - shared
