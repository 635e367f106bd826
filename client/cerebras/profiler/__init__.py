"""`cerebras.profiler` is another name of `cstorch.profiler`."""

from cstorch._internal.generations import alias

alias("cerebras.profiler", "cstorch.profiler")
