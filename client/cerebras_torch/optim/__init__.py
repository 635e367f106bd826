"""`cerebras_torch.optim` is another name of `cerebras_pytorch.optim`."""

from cstorch._internal.generations import alias

alias("cerebras_torch.optim", "cerebras_pytorch.optim")
