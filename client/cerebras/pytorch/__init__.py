"""`cerebras.pytorch` (release 2.2 and later) is another name of `cstorch`."""

from typing import TYPE_CHECKING

from cstorch._internal.generations import alias

if TYPE_CHECKING:  # names for editors and type checkers, which do not see those of an alias
    from cstorch import *

alias("cerebras.pytorch", "cstorch")
