"""`cerebras_pytorch.pb` (release 1.6) is another name of `cerebras_appliance.pb`."""

from cstorch._internal.generations import alias

alias("cerebras_pytorch.pb", "cerebras_appliance.pb")
