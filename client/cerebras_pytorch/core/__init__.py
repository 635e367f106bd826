"""cstorch.core, with the cb_model of releases 1.6 to 1.9, where cerebras_pytorch is another name of cerebras_torch."""

from cerebras_torch.core import appliance, cb_model
from cstorch._internal.generations import alias, inherit
from cstorch.core.name_scope import name_scope

__all__ = ["appliance", "cb_model", "name_scope"]

__getattr__ = inherit("cerebras_pytorch.core", "cstorch.core")

alias("cerebras_pytorch.core.appliance", "cerebras_torch.core.appliance")
alias("cerebras_pytorch.core.cb_model", "cerebras_torch.core.cb_model")
