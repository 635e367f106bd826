"""The listener of releases 2.0 and 2.1."""

from cstorch.experimental.listener import SummaryListener, create_listener, register_traced_tensor_hook

__all__ = ["SummaryListener", "create_listener", "register_traced_tensor_hook"]
