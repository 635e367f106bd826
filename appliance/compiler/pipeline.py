"""The compiler: CIRH text in, a plan for every role out. The passes, in order, are `compile_module`."""

import torch

from appliance.compiler.canonicalise import canonicalise
from appliance.compiler.cut import make_cut
from appliance.compiler.errors import CompileError
from appliance.compiler.pass_through import copy_what_passes_through
from appliance.compiler.plan import make_plan
from appliance.compiler.sharding.propagate import propagate
from appliance.compiler.target import Target
from cirh.errors import CirhError
from cirh.parser import parse_module
from cirh.verify import verify
from wsc.v1 import plan_pb2

__all__ = ["CompileError", "Target", "compile_module"]


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
    verify(module)
    canonicalise(module)
    copy_what_passes_through(module)
    try:
        with torch.no_grad():
            sharding = propagate(module, target.num_csx)
            cut = make_cut(module, sharding)
            return make_plan(cut, target)
    except CirhError as error:
        # A part of the batch does not suit an operation that the whole batch suits.
        raise CompileError(f"the step cannot be divided over {target.num_csx} wafers: {error}") from error
