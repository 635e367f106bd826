"""Keys for random numbers: gives each random operation without a key its own, which differs in each step.

The vendor's client writes all random operations of a step with the same seed and no key, which would give every layer
the same mask in every step. So the step gets a further state, `state.random.counter`, an int64 of rank 0 that each step
increments. The key of an operation is the counter, plus a hash of its seeds (blake2b), plus its index among the random
operations of the step times 2**40, modulo 2**64. Numbers are drawn from the key like all random numbers (Philox, see
`waferbox/cirh/calls/random_numbers.py`). They depend only on seeds, step, operation and position, are the same on any
number of wafers, and are repeated by a run that begins with the same counter. The counter's initial value, 0 or the
number of steps done before, is given by whoever starts the run. The numbers that the vendor's system draws are not
reproduced.
"""

import hashlib
from typing import Final

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from appliance.compiler.core.rewriter import Rewriter
from waferbox.cirh.dialect.attributes import AttrValue, attrs
from waferbox.cirh.dialect.operations import body_ops, return_of
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.graph import add_state
from waferbox.cirh.table.lookup import site_of

COUNTER: Final = "state.random.counter"
_SEEDS: Final = ("seed", "global_seed", "operational_seed")
_KEY_IS_OPTIONAL: Final = ("cirh.RandomUniform", "cirh.RandomNormal")
_STEPS: Final = 1 << 40  # steps before the keys of two operations could be equal
_WORD: Final = 1 << 64


def add_random_keys(module: ModuleOp) -> bool:
    """Gives a key to each random operation that has none. Returns whether there were any."""
    drawn = [op for op in body_ops(module) if op.name in _KEY_IS_OPTIONAL and not _has_key(op)]
    if not drawn:
        return False
    counter = add_state(module, COUNTER, tensor_type((), torch.int64))
    for place, op in enumerate(drawn):
        rewriter, attributes = Rewriter(op), attrs(op)
        seeds = [attributes.pop(name, 0) for name in _SEEDS]
        offset = rewriter.splat(_signed(_hashed(seeds) + place * _STEPS), (), torch.int64)
        (key,) = rewriter.emit("cirh.Add", [counter, offset])
        made = rewriter.emit(op.name, [*op.operands, key], attributes, types=[op.results[0].type])  # type: ignore[list-item]
        rewriter.replace(made)
    last = return_of(module)
    rewriter = Rewriter(last)
    (following,) = rewriter.emit("cirh.Add", [counter, rewriter.splat(1, (), torch.int64)])
    last.operands = [*list(last.operands)[:-1], following]
    return True


def _has_key(op: Operation) -> bool:
    *_, key, _ = site_of(op).segments
    return bool(key)


def _hashed(seeds: list[AttrValue]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(seeds).encode(), digest_size=8).digest(), "little")


def _signed(number: int) -> int:
    return (number + _WORD // 2) % _WORD - _WORD // 2
