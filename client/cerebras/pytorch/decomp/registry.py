"""Another name of cstorch.decomp.registry, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.decomp.registry import *
