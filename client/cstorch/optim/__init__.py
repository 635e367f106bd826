"""Optimizers whose step can be traced, and the schedules of their settings."""

from cstorch.optim import lr_scheduler, scheduler, weight_decay_scheduler
from cstorch.optim.adadelta import Adadelta
from cstorch.optim.adafactor import Adafactor
from cstorch.optim.adagrad import Adagrad
from cstorch.optim.adam import Adam, AdamW
from cstorch.optim.adamax import Adamax
from cstorch.optim.asgd import ASGD
from cstorch.optim.configure import (
    configure_lr_scheduler,
    configure_optimizer,
    configure_optimizer_params,
    configure_param_groups,
    configure_scheduler_params,
)
from cstorch.optim.lamb import Lamb
from cstorch.optim.lion import Lion
from cstorch.optim.muon import Muon
from cstorch.optim.nadam import NAdam
from cstorch.optim.optimizer import Optimizer
from cstorch.optim.radam import RAdam
from cstorch.optim.rmsprop import RMSprop
from cstorch.optim.rprop import Rprop
from cstorch.optim.sgd import SGD

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lamb",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "configure_lr_scheduler",
    "configure_optimizer",
    "configure_optimizer_params",
    "configure_param_groups",
    "configure_scheduler_params",
    "lr_scheduler",
    "scheduler",
    "weight_decay_scheduler",
]
