"""`cerebras.pytorch` (release 2.2 and later) is another name of `cstorch`."""

from cstorch.generations import alias

alias("cerebras.pytorch", "cstorch")
