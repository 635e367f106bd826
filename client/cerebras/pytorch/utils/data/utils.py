"""Another name of cstorch.utils.data, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.utils.data import *
