"""Another name of cstorch.nn, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.nn import *
