"""Another name of cstorch.utils.profiler, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.utils.profiler import *
