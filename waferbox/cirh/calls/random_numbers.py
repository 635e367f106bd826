"""Random tensors whose elements depend only on a key and their position, in whatever process and parts they are drawn.

Each key has a stream of 64-bit words, numpy's Philox, with random access. A tensor takes the words in the order of its
elements; every element, or small group of neighbours, takes a fixed number of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.spec import Call, Site
from waferbox.cirh.dialect.types import tensor_type

Words: TypeAlias = NDArray[np.uint64]

# Words that Philox makes at each value of its counter.
_COUNT_WORDS: Final = 4
# Words that are drawn at a time: they and their elements stay in the cache.
_BATCH_WORDS: Final = 1 << 13
# Up to so many elements of other parts between two of a part are drawn too, which costs less than skipping them.
_DRAWN_TOO: Final = 1 << 13


@dataclass(frozen=True, slots=True)
class Numbers:
    """A distribution, which makes `group` elements from `words` words."""

    dtype: torch.dtype
    group: int
    words: int
    make: Callable[[Words], torch.Tensor]  # may overwrite the words


@dataclass(frozen=True, slots=True)
class Part:
    """A division of a tensor into equal parts. Dimension `dim` is read as (outer, rest); rest has `count` blocks."""

    dim: int
    outer: int
    count: int


@dataclass(frozen=True, slots=True)
class _Bits:
    """The number of bits that an element takes, the number of these that it uses, and numpy's types of that size."""

    bits: int
    shown: int
    unsigned: type[np.unsignedinteger[Any]]
    signed: type[np.signedinteger[Any]]


# As many bits as torch uses, which are all that fit the mantissa.
_BITS: Final = {
    torch.float64: _Bits(64, 53, np.uint64, np.int64),
    torch.float32: _Bits(32, 24, np.uint32, np.int32),
    torch.float16: _Bits(16, 11, np.uint16, np.int16),
    torch.bfloat16: _Bits(16, 8, np.uint16, np.int16),
}
FLOATS: Final = tuple(_BITS)


def _shown(words: Words, bits: _Bits) -> NDArray[Any]:
    """Integers from 0 to 2**shown - 1."""
    unsigned: NDArray[Any] = words.view(bits.unsigned)
    unsigned >>= bits.unsigned(bits.bits - bits.shown)
    return unsigned.view(bits.signed)


def uniform(dtype: torch.dtype, low: float, high: float) -> Numbers:
    """The uniform distribution in [low, high), of a floating point type."""
    bits = _BITS[dtype]

    def make(words: Words) -> torch.Tensor:
        values = torch.from_numpy(_shown(words, bits)).to(dtype).mul_(2.0**-bits.shown)
        return values if (low, high) == (0.0, 1.0) else values.mul_(high - low).add_(low)

    return Numbers(dtype, 64 // bits.bits, 1, make)


def normal(dtype: torch.dtype, mean: float, std: float) -> Numbers:
    """The normal distribution, of a floating point type. The Box-Muller transform makes two neighbours.

    Elements are bitwise equal where numpy computes logarithm, sine and cosine alike, as on processors of one kind.
    """
    bits = _BITS[torch.float64 if dtype is torch.float64 else torch.float32]
    working = np.float64 if dtype is torch.float64 else np.float32

    def make(words: Words) -> torch.Tensor:
        shown = _shown(words, bits)
        radius: NDArray[Any] = shown[0::2].astype(working)
        angle: NDArray[Any] = shown[1::2].astype(working)
        radius += 1  # avoids the logarithm of 0
        radius *= 2.0**-bits.shown
        np.log(radius, out=radius)
        radius *= -2 * std**2
        np.sqrt(radius, out=radius)
        angle *= math.tau * 2.0**-bits.shown
        values: NDArray[Any] = np.empty((len(radius), 2), working)
        np.multiply(radius, np.cos(angle), out=values[:, 0])
        np.multiply(radius, np.sin(angle, out=angle), out=values[:, 1])
        if mean:
            values += mean
        return torch.from_numpy(values.reshape(-1)).to(dtype)

    return Numbers(dtype, 2, 2 * bits.bits // 64, make)


def bernoulli(probability: float) -> Numbers:
    """Truth values that are true with this probability, to 32 bits."""
    limit = round(probability * 2**32)

    def make(words: Words) -> torch.Tensor:
        if limit == 2**32:
            return torch.ones(2 * len(words), dtype=torch.bool)
        return torch.from_numpy(np.less(words.view(np.uint32), np.uint32(limit)))

    return Numbers(torch.bool, 2, 1, make)


def integers(dtype: torch.dtype, low: int, high: int) -> Numbers:
    """Uniform integers from low to high - 1."""
    span = high - low

    def make_from_halves(words: Words) -> torch.Tensor:
        scaled = words.view(np.uint32).astype(np.uint64)
        scaled *= np.uint64(span)
        scaled >>= np.uint64(32)
        return torch.from_numpy(scaled.view(np.int64)).add_(low).to(dtype)

    def make_from_words(words: Words) -> torch.Tensor:
        return torch.from_numpy((words % np.uint64(span)).view(np.int64)).add_(low).to(dtype)

    return Numbers(dtype, 2, 1, make_from_halves) if span <= 2**32 else Numbers(dtype, 1, 1, make_from_words)


def _fill(out: torch.Tensor, numbers: Numbers, key: int, start: int) -> None:
    """Writes elements start, start + 1, ... of a key's stream to a flat tensor."""
    first, ahead = divmod(start, numbers.group)
    counter, skipped = divmod(first * numbers.words, _COUNT_WORDS)
    stream = np.random.Philox(key=key, counter=counter)
    if skipped:
        stream.random_raw(skipped, output=False)
    batch = _BATCH_WORDS // numbers.words * numbers.group
    count = len(out)
    position = -ahead
    while position < count:
        groups = -(-min(batch, count - position) // numbers.group)
        made = numbers.make(stream.random_raw(groups * numbers.words))
        out[max(position, 0) : position + len(made)] = made[max(-position, 0) : count - position]
        position += len(made)


def draw(
    numbers: Numbers, key: int, shape: Sequence[int], part: Part | None = None, indices: Sequence[int] = (0,)
) -> torch.Tensor:
    """A tensor of this shape from a key's stream.

    Args:
        key: 0 <= key < 2**128.
        shape: shape of the result; with parts, the shape of these parts together.
        part: division of the whole tensor; None: the tensor is drawn whole.
        indices: the parts to draw, which follow each other in each block.
    """
    out = torch.empty(tuple(shape), dtype=numbers.dtype)
    if out.numel() == 0:
        return out
    if part is None:
        _fill(out.view(-1), numbers, key, 0)
        return out
    runs = math.prod(shape[: part.dim]) * part.outer
    blocks = out.view(runs, len(indices), -1)
    for position, index in enumerate(indices):
        _fill_part(blocks[:, position], numbers, key, part.count, index)
    return out


def _fill_part(rows: torch.Tensor, numbers: Numbers, key: int, count: int, index: int) -> None:
    """Writes block `index` of the `count` blocks in each row of the whole tensor."""
    num_rows, run = rows.shape
    whole = run * count
    if whole - run > _DRAWN_TOO:
        for row in range(num_rows):
            _fill(rows[row], numbers, key, row * whole + index * run)
        return
    at_once = max(1, 8 * _BATCH_WORDS // whole)
    buffer = torch.empty(at_once * whole, dtype=numbers.dtype)
    for first in range(0, num_rows, at_once):
        batch = rows[first : first + at_once]
        drawn = buffer[: len(batch) * whole]
        _fill(drawn, numbers, key, first * whole)
        batch.copy_(drawn.view(len(batch), count, run)[:, index])


# --- Preparing random operations --------------------------------------------------------------------------------------
#
# The key is an operand, a single int64, which differs in every step. Without that operand the key is made from the
# seeds among the attributes, and every call draws the same numbers. The operand `wafers` names parts of a whole tensor,
# which alone are drawn; the attribute `part` defines these: [dimension, outer, number of parts].


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
    """A call that draws from a distribution, which `distribution` makes from the operands that are its parameters."""
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
    """The division in the attribute `part`, checked against the result and the operand `wafers`."""
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
    """The shape of the whole tensor."""
    shape = list(site.result.shape)
    if site.segments[-1]:
        part = _part(site)
        shape[part.dim] = shape[part.dim] // site.operands[-1].shape[0] * part.count
        tensor_type(shape, site.result.dtype)  # raises CirhError for a tensor that is too large
    return tuple(shape)
