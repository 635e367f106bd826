"""The results of the stages as text: the module with notes on its operations, and the kernels of a plan.

Notes are attributes with a dot in their name, so the text can be parsed and means the same as without them.
"""

from collections.abc import Mapping
from typing import Final

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, ModuleOp, StringAttr
from xdsl.ir import BlockArgument, Operation, SSAValue

from appliance.compiler.cost.kernel_profile import profile_kernel
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.layers import Waits, partition
from appliance.compiler.sharding.propagate import Sharding
from waferbox.cirh.dialect.operations import Const, body_ops, func_of
from waferbox.cirh.text.printer import print_module
from waferbox.lair.lower import NotLowered, lower
from wsc.v1 import plan_pb2

PLACEMENT: Final = "wafer.placement"
SITE: Final = "wafer.site"
SEGMENT: Final = "wafer.segment"

Noted = Operation | BlockArgument
Notes = Mapping[Noted, str]


def placement_notes(module: ModuleOp, sharding: Sharding) -> dict[Noted, str]:
    """The placement of each value where it is made, and whether it is reduced."""

    def place(value: SSAValue) -> str:
        return f"{sharding.placements[value]}{', reduced' if value in sharding.reduced else ''}"

    notes: dict[Noted, str] = {argument: place(argument) for argument in func_of(module).block.args}
    for op in body_ops(module):
        if not isinstance(op, Const):
            notes[op] = "; ".join(place(result) for result in op.results)
    return notes


def site_notes(cut: Cut) -> dict[Noted, str]:
    """The roles that run each operation."""
    notes: dict[Noted, str] = dict.fromkeys(cut.wafer_ops, "wafers")
    for op in cut.memoryx_ops:
        notes[op] = "both" if op in notes else "MemoryX"
    return notes


def segment_notes(cut: Cut) -> dict[Noted, str]:
    """The segment of each of the wafers' operations. Sunk operations, such as views, have none."""
    return {
        op: f"{number} {segment.label}"
        for number, segment in enumerate(partition(cut, Waits(cut)))
        for op in segment.ops
    }


def noted_text(module: ModuleOp, name: str, notes: Notes, *, locations: bool) -> str:
    """The text of the module with notes, as attributes of this name. The module itself is unchanged afterwards."""
    function = func_of(module)
    arguments = function.attributes["arg_attrs"]
    ops = [op for op in body_ops(module) if op in notes]
    before = [op.attributes for op in ops]
    function.attributes["arg_attrs"] = ArrayAttr(
        DictionaryAttr({**attributes.data, name: StringAttr(notes[argument])}) if argument in notes else attributes
        for argument, attributes in zip(function.block.args, function.argument_attributes, strict=True)
    )
    try:
        for op in ops:
            op.attributes = {**op.attributes, name: StringAttr(notes[op])}
        return print_module(module, locations=locations)
    finally:
        function.attributes["arg_attrs"] = arguments
        for op, attributes in zip(ops, before, strict=True):
            op.attributes = attributes


def loops_text(plan: plan_pb2.Plan) -> str:
    """MemoryX's kernels as LAIR, each loop once; for kernels that are no loops, the reason."""
    pieces: dict[str, list[str]] = {}
    for shard, part in enumerate(plan.memoryx):
        for kernel in part.kernels:
            try:
                text = str(lower(profile_kernel(kernel.cirh).module))
            except NotLowered as obstacle:
                text = f"// no loop: {obstacle}\n"
            pieces.setdefault(text, []).append(f"shard {shard} kernel {kernel.id}")
    return "\n".join(f"// ----- MemoryX {', '.join(names)}\n{text}" for text, names in pieces.items())


def kernels_text(plan: plan_pb2.Plan) -> str:
    """The modules of a plan's kernels, each under a comment with the role or the layers that run it."""
    layers: dict[int, list[str]] = {}
    regions = (region.instructions for region in plan.pipeline.regions)
    for instruction in (i for listed in (plan.wafer.instructions, *regions) for i in listed):
        if instruction.WhichOneof("kind") == "run":
            layers.setdefault(instruction.run.kernel, []).append(ascii(instruction.run.layer))
    layers = {kernel: list(dict.fromkeys(names)) for kernel, names in layers.items()}
    pieces = [
        f"// ----- wafer kernel {kernel.id}: {', '.join(layers[kernel.id])}\n{kernel.cirh}"
        for kernel in (*plan.wafer.kernels, *plan.pipeline.kernels)
    ]
    for shard, part in enumerate(plan.memoryx):
        pieces += [f"// ----- MemoryX shard {shard} kernel {kernel.id}\n{kernel.cirh}" for kernel in part.kernels]
    return "\n".join(pieces)
