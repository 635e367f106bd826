"""Another name of cstorch.optim.scheduler, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.optim.scheduler import *
