"""Another name of cstorch.utils, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.utils import *
