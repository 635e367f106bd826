"""`cerebras.appliance` is another name of `cerebras_appliance`."""

from cstorch._internal.generations import alias

alias("cerebras.appliance", "cerebras_appliance")
