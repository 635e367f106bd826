"""Advances a random generator of torch without making its numbers.

The generator is the Mersenne twister mt19937, whose words obey a linear recurrence over GF(2) with a known
characteristic polynomial p. So the words after a distance n are a fixed combination of the next 19937 words. The
coefficients are those of x^n modulo p, which squaring gives in milliseconds for any n.
"""

import functools

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint32]

_WORDS = 624  # in a block, which the generator makes at once
_SHIFT = 397
_LAG = _WORDS - _SHIFT  # the number of words that do not depend on each other
_TWIST = 0x9908B0DF
_DEGREE = 19937
_UPPER, _LOWER = 0x80000000, 0x7FFFFFFF
_WALKED_BLOCKS = 1000  # up to this distance making the words is faster than a jump

# torch's state: the number of words left in the block (plus one), the index of the next, the block as 64-bit integers.
_LEFT = slice(8, 12)
_NEXT = slice(16, 24)
_BLOCK = slice(24, 24 + 8 * _WORDS)

_LEAST_NORMAL = 16  # torch makes fewer normal numbers by another algorithm
_HALVES = frozenset({torch.float16, torch.bfloat16})


def uniform_draws(count: int, dtype: torch.dtype) -> int | None:
    """Returns the number of words that `uniform_` uses for a contiguous tensor; None if it is not known."""
    return count if dtype is torch.float32 or dtype in _HALVES else None


def normal_draws(count: int, dtype: torch.dtype) -> int | None:
    """Returns the number of words that `normal_` uses for a contiguous tensor; None if it is not known."""
    rest = count % _LEAST_NORMAL
    if count < _LEAST_NORMAL or (rest and dtype is not torch.float32):
        return None
    # The last sixteen are drawn again if the count is no multiple.
    return count + (_LEAST_NORMAL if rest else 0) if dtype is torch.float32 or dtype in _HALVES else None


def skip(state: torch.Tensor, draws: int) -> torch.Tensor:
    """Returns the state of torch's CPU generator after some more words.

    Args:
        state: The state, as of `torch.get_rng_state`.
        draws: The number of words, of 32 bits.
    """
    if not draws:
        return state
    after = state.clone()
    raw = after.numpy()
    used = _WORDS + 1 - int(raw[_LEFT].view(np.int32)[0])
    blocks, used = divmod(used + draws - 1, _WORDS)
    used += 1
    raw[_LEFT].view(np.int32)[0] = _WORDS + 1 - used
    raw[_NEXT].view(np.uint64)[0] = used
    if blocks:
        block = raw[_BLOCK].view(np.uint64)
        block[:] = _later(block.astype(np.uint32), blocks)
    return after


def _later(block: Words, blocks: int) -> Words:
    """Returns the block at a distance of some blocks."""
    if blocks <= _WALKED_BLOCKS:
        walker = np.random.MT19937()
        walker.state = {"bit_generator": "MT19937", "state": {"key": block, "pos": _WORDS}}
        walker.random_raw((blocks - 1) * _WORDS + 1, output=False)
        key: Words = walker.state["state"]["key"]
        return key
    # From the next block on, since the recurrence does not determine the first word of this one.
    words = _continue(block, _DEGREE + 2 * _WORDS)[_WORDS:]
    windows = np.lib.stride_tricks.sliding_window_view(words, _WORDS)
    chosen = _jump((blocks - 1) * _WORDS)
    later = np.zeros(_WORDS, np.uint32)
    for begin in range(0, len(chosen), 64):  # few enough for the cache
        later ^= np.bitwise_xor.reduce(windows[chosen[begin : begin + 64]], axis=0)
    return later


def _continue(block: Words, count: int) -> Words:
    """Returns a block and the words after it, `count` in total."""
    words = np.empty(count + _LAG, np.uint32)
    words[:_WORDS] = block
    for begin in range(0, count - _WORDS, _LAG):
        mixed = (words[begin : begin + _LAG] & _UPPER) | (words[begin + 1 : begin + 1 + _LAG] & _LOWER)
        twisted = words[begin + _SHIFT : begin + _WORDS] ^ (mixed >> 1) ^ ((mixed & 1) * np.uint32(_TWIST))
        words[begin + _WORDS : begin + _WORDS + _LAG] = twisted
    return words[:count]


@functools.lru_cache(maxsize=64)
def _jump(distance: int) -> npt.NDArray[np.intp]:
    """Returns the indices of the words whose sum is the word at a distance: the exponents of x^distance mod p."""
    power = 1
    for bit in bin(distance)[2:]:
        power = _remainder(int(bin(power)[2:], 4))  # the square: a polynomial's bits with zeros between them
        if bit == "1":
            power = _remainder(power << 1)
    return np.array(_exponents(power), np.intp)


def _remainder(polynomial: int) -> int:
    mask = (1 << _DEGREE) - 1
    while high := polynomial >> _DEGREE:
        polynomial &= mask
        for exponent in _characteristic():
            polynomial ^= high << exponent
    return polynomial


@functools.cache
def _characteristic() -> tuple[int, ...]:
    """Returns the exponents of the characteristic polynomial, without the highest.

    With s = x^624 + x^397 and t = x^623 + x^396 it is s t^31 + the sum of s t^(30 - i) over the bits i < 31 of the
    twist, + bit 31 by itself (Matsumoto and Nishimura, 1998).
    """
    powers = [1]
    for _ in range(31):
        powers.append((powers[-1] << (_WORDS - 1)) ^ (powers[-1] << (_SHIFT - 1)))
    total = powers[31]
    for bit in range(31):
        if _TWIST >> bit & 1:
            total ^= powers[30 - bit]
    total = (total << _WORDS) ^ (total << _SHIFT) ^ (_TWIST >> 31)
    return tuple(exponent for exponent in _exponents(total) if exponent < _DEGREE)


def _exponents(polynomial: int) -> list[int]:
    return [exponent for exponent, bit in enumerate(reversed(bin(polynomial)[2:])) if bit == "1"]
