"""Stand-ins for the compiled parts of the real client."""

from cstorch.lib import cerebras_pytorch_lib

__all__ = ["cerebras_pytorch_lib"]
