"""Another name of cstorch.amp, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.amp import *
