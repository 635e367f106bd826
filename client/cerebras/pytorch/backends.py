"""Another name of cstorch.backends, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.backends import *
