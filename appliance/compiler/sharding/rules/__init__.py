"""Sharding rules, one class of operations a file: they register themselves when the package is imported."""

from appliance.compiler.sharding.rules import (
    attention,
    image,
    index,
    network,
    norm,
    pointwise,
    random,
    reduction,
    shape,
)

__all__ = ["attention", "image", "index", "network", "norm", "pointwise", "random", "reduction", "shape"]
