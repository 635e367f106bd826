"""Another name of cstorch.experimental, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.experimental import *
