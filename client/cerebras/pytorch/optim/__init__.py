"""Another name of cstorch.optim, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.optim import *
