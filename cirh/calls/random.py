"""Preparing operations that draw random numbers (cirh.calls.random_numbers).

The key of the numbers is an operand, a single int64, which differs in every step. Without one it is made of the seeds
among the attributes, and every call draws the same numbers. With the operand `wafers` only those parts of a whole
tensor are drawn that it names; attribute `part` then says what the parts are: [dimension, outer, number of parts].
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch

from cirh.calls.random_numbers import FLOATS, Numbers, Part, bernoulli, draw, integers, normal, uniform
from cirh.dialect.errors import CirhError
from cirh.dialect.spec import Call, Site
from cirh.dialect.types import tensor_type

_WORD: Final = (1 << 64) - 1


def prepare_uniform(site: Site) -> Call:
    dtype = _float_type(site)
    call = _prepare(site, lambda low, high: uniform(dtype, low, high), ("operational_seed", "global_seed"))
    shape = site.statics[0].tensor().reshape(-1).tolist()
    if tuple(shape) != _whole_shape(site):
        raise CirhError(f"{site.name}: shape {shape} is not that of the whole tensor, {list(_whole_shape(site))}")
    return call


def prepare_normal(site: Site) -> Call:
    dtype = _float_type(site)
    return _prepare(site, lambda mean, std: normal(dtype, mean, std), ("seed",))


def prepare_bernoulli(site: Site) -> Call:
    probability = float(site.get("probability"))
    if not 0 <= probability <= 1:
        raise CirhError(f"{site.name}: probability {probability} is not between 0 and 1")
    if site.result.dtype is not torch.bool:
        raise CirhError(f"{site.name} makes bool, not {site.result.dtype}")
    numbers = bernoulli(probability)
    return _prepare(site, lambda: numbers, ())


def prepare_integer(site: Site) -> Call:
    low, high = int(site.get("low")), int(site.get("high"))
    if not -(2**63) <= low < high < 2**63 or high - low >= 2**63:
        raise CirhError(f"{site.name}: there is no range of int64 from {low} to {high}")
    numbers = integers(site.result.dtype, low, high)
    return _prepare(site, lambda: numbers, ())


def _float_type(site: Site) -> torch.dtype:
    dtype = site.result.dtype
    if dtype not in FLOATS:
        raise CirhError(f"{site.name} makes floating point numbers, not {dtype}")
    return dtype


def _prepare(site: Site, distribution: Callable[..., Numbers], seeds: tuple[str, ...]) -> Call:
    """distribution: takes the operands that are single numbers: all but the static one, the key and the wafers."""
    *_, keys, wafers = site.segments
    given = len(site.operands) - len(site.statics) - keys - wafers
    shape = site.result.shape
    part = _part(site) if wafers else None
    for operand in site.operands[:given]:
        if operand.shape or not operand.dtype.is_floating_point:
            raise CirhError(f"{site.name}: takes single floating point numbers")
    if keys and site.operands[len(site.operands) - wafers - 1] != ((), torch.int64):
        raise CirhError(f"{site.name}: the key is a single int64")
    if not wafers and site.get("part") is not None:
        raise CirhError(f"{site.name}: part without wafers")
    seed = 0
    for name in seeds:
        seed = seed << 64 | (int(site.get(name, 0)) & _WORD)

    def call(*operands: torch.Tensor) -> torch.Tensor:
        numbers = distribution(*(float(operand) for operand in operands[:given]))
        key = int(operands[given]) & _WORD if keys else seed
        return draw(numbers, key, shape, part, operands[-1].tolist() if wafers else (0,))

    return Call(call)


def _part(site: Site) -> Part:
    """What the attribute says, checked against the result and the operand."""
    wafers, shape = site.operands[-1], site.result.shape
    given: Sequence[int] = site.get("part", ())
    if len(wafers.shape) != 1 or wafers.dtype is not torch.int64:
        raise CirhError(f"{site.name}: wafers are a row of int64")
    if len(given) != 3 or not 0 <= given[0] < len(shape) or min(given[1:]) < 1:
        raise CirhError(f"{site.name}: part is [dimension, outer, number of parts], not {list(given)}")
    part = Part(*given)
    if not wafers.shape[0] or shape[part.dim] % (part.outer * wafers.shape[0]):
        raise CirhError(f"{site.name}: {list(shape)} does not hold {wafers.shape[0]} parts of {list(given)}")
    return part


def _whole_shape(site: Site) -> tuple[int, ...]:
    """The shape of the tensor of which the result has some parts, or all."""
    shape = list(site.result.shape)
    if site.segments[-1]:
        part = _part(site)
        shape[part.dim] = shape[part.dim] // site.operands[-1].shape[0] * part.count
        tensor_type(shape, site.result.dtype)  # refuses what is too large
    return tuple(shape)
