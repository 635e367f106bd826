"""`cerebras.workflow` (release 1.6) is another name of `cerebras_pytorch.workflow`."""

from cstorch._internal.generations import alias

alias("cerebras.workflow", "cerebras_pytorch.workflow")
