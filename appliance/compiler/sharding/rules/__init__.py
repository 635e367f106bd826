"""Sharding rules, a file for each class of operations. They register themselves when the package is imported."""

from appliance.compiler.sharding.rules import (
    attention,
    dot_general,
    image,
    index,
    linear_cross_entropy,
    matrices,
    network,
    norm,
    picking,
    pointwise,
    reduction,
    shape,
)

__all__ = [
    "attention",
    "dot_general",
    "image",
    "index",
    "linear_cross_entropy",
    "matrices",
    "network",
    "norm",
    "picking",
    "pointwise",
    "reduction",
    "shape",
]
