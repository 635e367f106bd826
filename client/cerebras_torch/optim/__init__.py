"""`cerebras_torch.optim` is another name of `cerebras_pytorch.optim`."""

from typing import TYPE_CHECKING

from cstorch._internal.generations import alias

if TYPE_CHECKING:  # names for editors and type checkers, which do not see those of an alias
    from cstorch.optim import *  # noqa: F403

alias("cerebras_torch.optim", "cerebras_pytorch.optim")
