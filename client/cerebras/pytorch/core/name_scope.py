"""Another name of cstorch.core.name_scope, for type checkers alone. Written by docs/alias_modules.py."""

from cstorch.core.name_scope import *
