"""Another name of cstorch.experimental.listener, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.experimental.listener import *
