"""`cerebras.appliance` is another name of `cerebras_appliance`."""

from cstorch.generations import alias

alias("cerebras.appliance", "cerebras_appliance")
