"""Broken sharding rules, and whether random programs notice them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from random_programs import traced_program

from appliance.compiler.core.errors import CompileError
from appliance.compiler.sharding.rules.rule import SUM, Decompose, Outcome, Placement, Query, R, sharded
from cstorch.errors import CompileError as LoweringError

cached_program = functools.lru_cache(maxsize=None)(traced_program)


def noticed(operations: tuple[str, ...], programs: range = range(40)) -> bool:
    """Whether one of some programs of these operations goes wrong."""
    for number in programs:
        try:
            traced, batch = cached_program(number, operations)
            traced.check([batch], [(2, 1)], seeds=[0])
        except LoweringError:
            continue
        except CompileError as error:
            # The compiler itself found that the parts do not fit together.
            if "on one wafer instead of" in str(error) or "cannot be divided over" in str(error):
                return True
        except (AssertionError, LookupError, RuntimeError, ValueError):
            return True
    return False


def replaced(outcome: Outcome, results: list[Placement]) -> Outcome:
    return dataclasses.replace(outcome, results=results)


def never_decomposed(
    rule: Callable[[Query], Outcome], needs: Callable[[Query], list[Placement]], *results: Placement
) -> Callable[[Query], Outcome]:
    def mutant(query: Query) -> Outcome:
        try:
            return rule(query)
        except Decompose:
            return Outcome(operands=needs(query), results=list(results))

    return mutant


def all_cut(query: Query) -> list[Placement]:
    return [query.sharded[0] if shape else R for shape in (query.shape(i) for i in range(len(query.operands)))]


def mutate_results(change: Callable[[Query, Outcome], list[Placement]]) -> Callable[[Any], Any]:
    return lambda rule: lambda query: replaced(outcome := rule(query), change(query, outcome))


def uncounted(query: Query, outcome: Outcome) -> list[Placement]:
    return [R if result == SUM else result for result in outcome.results]


def one_block(query: Query, outcome: Outcome) -> list[Placement]:
    return [sharded(result.dim) if result.is_sharded else result for result in outcome.results]


def first_dimension(query: Query, outcome: Outcome) -> list[Placement]:
    return [sharded(0) if result.is_sharded else result for result in outcome.results]


def as_sum(query: Query, outcome: Outcome) -> list[Placement]:
    return [SUM if result.is_partial else result for result in outcome.results]
