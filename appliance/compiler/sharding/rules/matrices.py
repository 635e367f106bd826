"""Sharding rules: decompositions of matrices and what is computed with them, for each matrix of a batch by itself."""

from collections.abc import Mapping
from typing import Final

from appliance.compiler.sharding.rules.rule import Outcome, Placement, Query, R, rule, sharded

# By operation, the ranks of an operand and of a result for a single matrix; the dimensions before are those of a batch.
# Batches are broadcast, with their dimensions aligned at the right.
_RANKS: Final[Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "aten._linalg_det": ((2,), (0, 2, 1)),
    "aten._linalg_eigh": ((2,), (1, 2)),
    "aten._linalg_slogdet": ((2,), (0, 0, 2, 1)),
    "aten._linalg_solve_ex": ((2, 2), (2, 2, 1, 0)),
    "aten._linalg_svd": ((2,), (2, 1, 2)),
    "aten.cholesky": ((2,), (2,)),
    "aten.cholesky_inverse": ((2,), (2,)),
    "aten.cholesky_solve": ((2, 2), (2,)),
    "aten.linalg_cholesky_ex": ((2,), (2, 0)),
    "aten.linalg_householder_product": ((2, 1), (2,)),
    "aten.linalg_inv_ex": ((2,), (2, 0)),
    "aten.linalg_ldl_factor_ex": ((2,), (2, 1, 0)),
    "aten.linalg_ldl_solve": ((2, 1, 2), (2,)),
    "aten.linalg_lu": ((2,), (2, 2, 2)),
    "aten.linalg_lu_factor_ex": ((2,), (2, 1, 0)),
    "aten.linalg_lu_solve": ((2, 1, 2), (2,)),
    "aten.linalg_matrix_exp": ((2,), (2,)),
    "aten.linalg_qr": ((2,), (2, 2)),
    "aten.linalg_solve_triangular": ((2, 2), (2,)),
    "aten.lu_unpack": ((2, 1), (2, 2, 2)),
    "aten.ormqr": ((2, 1, 2), (2,)),
    "aten.triangular_solve": ((2, 2), (2, 2)),
}


@rule(*_RANKS)
def matrices(query: Query) -> Outcome:
    """The dimension of the samples must be one of the batch; operands without it are whole on each wafer."""
    if not query.sharded:
        return query.replicated()
    operand_ranks, result_ranks = _RANKS[query.op.name]
    if query.op.name == "aten._linalg_solve_ex" and len(query.result_shape()) < len(query.shape(0)):
        operand_ranks, result_ranks = (2, 1), (1, 2, 1, 0)  # a vector for each matrix
    index = next(i for i, placement in enumerate(query.placements) if placement.is_sharded)
    cut = query.placements[index]
    # The cut dimension, counted from the last one of the batch.
    behind = len(query.shape(index)) - operand_ranks[index] - cut.dim
    if behind <= 0:
        raise query.mixes(f"takes matrices of several samples ({cut})")

    def placement(shape: tuple[int, ...], rank: int) -> Placement:
        dim = len(shape) - rank - behind
        return sharded(dim, cut.outer) if dim >= 0 and shape[dim] > 1 else R

    operands = [placement(query.shape(i), rank) for i, rank in enumerate(operand_ranks)]
    results = [placement(query.result_shape(i), rank) for i, rank in enumerate(result_ranks)]
    return Outcome(operands=operands, results=results)
