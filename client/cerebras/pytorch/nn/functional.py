"""Another name of cstorch.nn.functional, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.nn.functional import *
