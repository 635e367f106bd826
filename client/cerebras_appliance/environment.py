"""Environment variables for the input workers."""

from cstorch.distributed.worker_environment import appliance_environ

__all__ = ["appliance_environ"]
