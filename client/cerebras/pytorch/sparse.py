"""Another name of cstorch.sparse, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.sparse import *
