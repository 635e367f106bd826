"""Another name of cstorch.core, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.core import *
