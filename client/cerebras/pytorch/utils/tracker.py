"""Another name of cstorch.utils.tracker, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.utils.tracker import *
