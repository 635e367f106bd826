"""Environment variables for the input workers."""

from cstorch.distributed.worker import appliance_environ

__all__ = ["appliance_environ"]
