"""This process, its session and its run, the modes of a run, and names for parts of the step."""

from cerebras_torch.core import appliance, cb_model
from cstorch._internal.generations import inherit
from cstorch.core import modes
from cstorch.core.name_scope import name_scope

__all__ = ["appliance", "cb_model", "modes", "name_scope"]

__getattr__ = inherit("cerebras_torch.core", "cstorch.core")
