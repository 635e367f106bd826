"""`cerebras.framework.torch` (releases 1.6 and 1.7) is another name of `cerebras_torch`."""

from typing import TYPE_CHECKING

from cstorch._internal.generations import alias

if TYPE_CHECKING:  # names for editors and type checkers, which do not see those of an alias
    from cerebras_torch import *  # noqa: F403
    from cerebras_torch import __getattr__ as __getattr__

alias("cerebras.framework.torch", "cerebras_torch")
