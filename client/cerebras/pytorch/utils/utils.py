"""Another name of cstorch.utils.utils, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.utils.utils import *
