"""Another name of cstorch.optim.weight_decay_scheduler, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.optim.weight_decay_scheduler import *
