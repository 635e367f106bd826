"""`cerebras.framework.torch` (releases 1.6 and 1.7) is another name of `cerebras_torch`."""

from cstorch._internal.generations import alias

alias("cerebras.framework.torch", "cerebras_torch")
