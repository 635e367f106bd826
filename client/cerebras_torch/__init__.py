"""`import cerebras_torch as cbtorch`: release 1.2 of the API, also known as cerebras.framework.torch.

    cbtorch.initialize(cs_ip=...)
    model = cbtorch.module(Model())
    dataloader = cbtorch.dataloader(torch_dataloader)
    with cbtorch.Session(model, optimizer, criterion, mode="train") as session:
        for batch in dataloader:
            ...  # a plain step of PyTorch

All else is cstorch.
"""

from cerebras_torch import amp, core, optim
from cerebras_torch.loader import dataloader
from cerebras_torch.run import current_environment as env
from cerebras_torch.run import current_run as state
from cerebras_torch.session import Session
from cerebras_torch.setup import compile, initialize, module, optimizer
from cstorch._internal.generations import inherit
from cstorch.utils import data

__all__ = [
    "Session",
    "amp",
    "compile",
    "core",
    "data",
    "dataloader",
    "env",
    "initialize",
    "module",
    "optim",
    "optimizer",
    "state",
]

__getattr__ = inherit("cerebras_torch", "cstorch")
