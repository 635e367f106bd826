"""`cerebras.profiler` is another name of `cstorch.profiler`."""

from cstorch.generations import alias

alias("cerebras.profiler", "cstorch.profiler")
