"""`cerebras.pb` (releases 1.6 to 1.8) is another name of `cerebras_appliance.pb`."""

from cstorch._internal.generations import alias

alias("cerebras.pb", "cerebras_appliance.pb")
