"""Sharding rules, one class of operations a file: they register themselves when the package is imported."""

from appliance.compiler.sharding.rules import (
    attention,
    dot_general,
    image,
    index,
    network,
    norm,
    picking,
    pointwise,
    random,
    reduction,
    shape,
)

__all__ = [
    "attention",
    "dot_general",
    "image",
    "index",
    "network",
    "norm",
    "picking",
    "pointwise",
    "random",
    "reduction",
    "shape",
]
