"""Sharding rules: operations that draw random numbers, whole or, by the numbers of the wafers, in parts."""

from appliance.compiler.sharding.rules.rule import Outcome, Query, R, rule, sharded


@rule("cirh.RandomUniform", "cirh.RandomNormal", "cirh.RandomBernoulli", "cirh.RandomInteger")
def random(query: Query) -> Outcome:
    """The numbers of the wafers stand last; there is attribute `part` if they are there."""
    part = query.get("part")
    if part is None:
        return query.replicated()
    dim, outer, count = part
    if count != query.num_parts or query.shape(len(query.operands) - 1) != (count,):
        raise query.mixes(f"is drawn in {count} parts")
    return Outcome(wants=[*[R] * (len(query.operands) - 1), sharded(0)], results=[sharded(dim, outer)])
