"""Another name of cstorch.utils.nest, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.utils.nest import *
