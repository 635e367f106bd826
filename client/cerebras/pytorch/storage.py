"""Another name of cstorch.storage, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.storage import *
