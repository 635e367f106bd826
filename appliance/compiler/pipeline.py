"""The compiler: CIRH text in, a plan for every role out.

First the passes on the module (`PASSES`), in order; each changes the module in place, and any of them can be run alone
on text (`waferbox opt`). Then the stages that divide the work (`STAGES`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from xdsl.dialects.builtin import ModuleOp

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import Half, KernelLibrary, Precision, Target
from appliance.compiler.passes.canonicalise import canonicalise
from appliance.compiler.passes.cse import join_common_subexpressions
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.passes.fold import fold_constants
from appliance.compiler.passes.fuse_attention import fuse_attention
from appliance.compiler.passes.fuse_bias import fuse_bias
from appliance.compiler.passes.fuse_cross_entropy import fuse_cross_entropy
from appliance.compiler.passes.fuse_layer_norm import fuse_layer_norm
from appliance.compiler.passes.pass_through import copy_what_passes_through
from appliance.compiler.passes.vendor.divisions import replace_floor_divisions
from appliance.compiler.passes.vendor.gathers import replace_gathers
from appliance.compiler.passes.vendor.norms import replace_norms
from appliance.compiler.passes.vendor.pools import replace_uneven_pools
from appliance.compiler.passes.vendor.random_keys import add_random_keys
from appliance.compiler.passes.vendor.slices import replace_slices
from appliance.compiler.stages import STAGES, Stages
from cirh.modules.verify import verify
from cirh.text.parser import parse_module
from cirh.text.printer import print_module
from wsc.v1 import plan_pb2

__all__ = ["PASSES", "CompileError", "Half", "KernelLibrary", "Pass", "Precision", "Target", "compile_module"]


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
        ("random-keys", add_random_keys, "a counter, and keys made of it, for random numbers that come without"),
        ("norms", replace_norms, "norms of the real dialect -> torch's, which share their statistics"),
        ("pools", replace_uneven_pools, "adaptive pooling to sizes that do not divide -> torch's"),
        ("divisions", replace_floor_divisions, "integers divided by //, which the real dialect cuts -> torch's"),
        ("gathers", replace_gathers, "torch.gather as the real dialect has it -> torch's"),
        ("slices", replace_slices, "slices of the real dialect -> torch's, and padding for their gradients"),
        ("canonicalise", canonicalise, "drop operations that do nothing, join views, put transposes inside products"),
        ("fold", fold_constants, "compute what depends on constants alone, where it stays small"),
        ("cse", join_common_subexpressions, "join equal operations within a layer"),
        ("fuse-bias", fuse_bias, "product + bias -> aten.addmm"),
        ("fuse-layer-norm", fuse_layer_norm, "layer norm that is written out -> aten.native_layer_norm"),
        ("fuse-cross-entropy", fuse_cross_entropy, "softmax cross entropy and its gradient -> one operation"),
        ("fuse-attention", fuse_attention, "attention that is written out, forward only -> cirh.Attention"),
        ("dce", eliminate_dead_code, "drop what no result depends on"),
        ("pass-through", copy_what_passes_through, "give results that are arguments or constants a copy of their own"),
    )
)


def compile_module(text: str, target: Target, keep: Callable[[str, str], None] | None = None) -> plan_pb2.Plan:
    """Compiles a step.

    Args:
        text: one module in CIRH; nothing in it is believed.
        target: the cluster to compile for.
        keep: gets a name and a text for each pass that changed the module, and for each stage.

    Returns:
        The plan; equal for equal text and target.

    Raises:
        CirhError: the text is no valid module.
        CompileError: the step cannot run on the target.
    """
    module = parse_module(text)
    for number, step in enumerate(PASSES, 1):
        if step.run(module) and keep is not None:
            keep(f"{number:02}-{step.name}", print_module(module))
    stages = Stages(module, target)
    if keep is not None:
        for number, (name, stage) in enumerate(STAGES.items(), len(PASSES) + 1):
            keep(f"{number:02}-{name}", stage.text(stages))
    return stages.plan
