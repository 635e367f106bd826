"""Another name of cstorch.core.annotation, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.core.annotation import *
