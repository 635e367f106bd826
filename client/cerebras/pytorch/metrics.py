"""Another name of cstorch.metrics, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.metrics import *
