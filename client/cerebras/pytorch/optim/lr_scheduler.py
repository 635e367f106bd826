"""Another name of cstorch.optim.lr_scheduler, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.optim.lr_scheduler import *
