"""Another name of cstorch.decomp, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.decomp import *
