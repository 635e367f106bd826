"""Another name of cstorch.utils.tensorboard, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.utils.tensorboard import *
