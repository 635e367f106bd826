"""The compiler: CIRH text in, a plan for every role out.

First the passes on the module (`PASSES`), in order; each changes the module in place, and any of them can be run alone
on text (`waferbox opt`). Then the stages that divide the work: sharding, the cut between wafers and MemoryX, layers and
schedules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from xdsl.dialects.builtin import ModuleOp

from appliance.compiler.cut import make_cut
from appliance.compiler.errors import CompileError
from appliance.compiler.passes.canonicalise import canonicalise
from appliance.compiler.passes.cse import join_common_subexpressions
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.passes.fold import fold_constants
from appliance.compiler.passes.fuse_bias import fuse_bias
from appliance.compiler.passes.fuse_cross_entropy import fuse_cross_entropy
from appliance.compiler.passes.fuse_layer_norm import fuse_layer_norm
from appliance.compiler.passes.pass_through import copy_what_passes_through
from appliance.compiler.plan import make_plan
from appliance.compiler.sharding.propagate import propagate
from appliance.compiler.target import Target
from cirh.errors import CirhError
from cirh.parser import parse_module
from cirh.verify import verify
from wsc.v1 import plan_pb2

__all__ = ["PASSES", "CompileError", "Pass", "Target", "compile_module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A rewriting of a module in place. `run` says whether it changed anything."""

    name: str
    description: str
    run: Callable[[ModuleOp], bool]


def _verify(module: ModuleOp) -> bool:
    verify(module)
    return False


PASSES: Final = tuple(
    Pass(name=name, run=run, description=description)
    for name, run, description in (
        ("verify", _verify, "infer every type anew; refuse what does not hold together"),
        ("canonicalise", canonicalise, "drop operations that do nothing, join views, put transposes inside products"),
        ("fold", fold_constants, "compute what depends on constants alone, where it stays small"),
        ("cse", join_common_subexpressions, "join equal operations within a layer"),
        ("fuse-bias", fuse_bias, "product + bias -> aten.addmm"),
        ("fuse-layer-norm", fuse_layer_norm, "layer norm that is written out -> aten.native_layer_norm"),
        ("fuse-cross-entropy", fuse_cross_entropy, "softmax cross entropy and its gradient -> one operation"),
        ("dce", eliminate_dead_code, "drop what no result depends on"),
        ("pass-through", copy_what_passes_through, "give results that are arguments or constants a copy of their own"),
    )
)


def compile_module(text: str, target: Target) -> plan_pb2.Plan:
    """Compiles a step.

    Args:
        text: one module in CIRH; nothing in it is believed.
        target: the cluster to compile for.

    Returns:
        The plan; equal for equal text and target.

    Raises:
        CirhError: the text is no valid module.
        CompileError: the step cannot run on the target.
    """
    module = parse_module(text)
    for step in PASSES:
        step.run(module)
    try:
        with torch.no_grad():
            sharding = propagate(module, target.num_csx)
            cut = make_cut(module, sharding)
            return make_plan(cut, target)
    except CirhError as error:
        # A part of the batch does not suit an operation that the whole batch suits.
        raise CompileError(f"the step cannot be divided over {target.num_csx} wafers: {error}") from error
