"""Another name of cstorch.utils.benchmark, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.utils.benchmark import *
