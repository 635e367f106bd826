"""Another name of cstorch.distributed, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.distributed import *
