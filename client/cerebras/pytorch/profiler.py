"""Another name of cstorch.profiler, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.profiler import *
