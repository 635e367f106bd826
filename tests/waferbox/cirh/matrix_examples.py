"""Examples of decompositions of matrices, and of what is computed with them."""

from collections.abc import Iterator
from typing import Any

import torch


def matrix_examples(e: Any) -> Iterator[Any]:
    """`e` makes an example of an operation of ATen."""
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.rand(2, 3, 3, generator=generator) for _ in range(2))
    positive = a @ a.mT + torch.eye(3)
    factor = torch.linalg.cholesky(positive)
    lu, pivots = torch.linalg.lu_factor(positive)
    ldl, ldl_pivots = torch.linalg.ldl_factor(positive)
    reflections, scales = torch.geqrf(a)
    for name in (
        *("cholesky", "linalg_cholesky_ex", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_lu_factor_ex"),
        *("linalg_lu", "linalg_qr", "linalg_matrix_exp"),
        *("_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_svd"),
    ):
        yield e(name, positive)
    yield e("cholesky_inverse", factor)
    yield e("cholesky_solve", b, factor)
    yield e("linalg_ldl_solve", ldl, ldl_pivots, b)
    yield e("linalg_lu_solve", lu, pivots, b)
    yield e("lu_unpack", lu, pivots)
    yield e("linalg_householder_product", reflections, scales)
    yield e("ormqr", reflections, scales, b)
    yield e("linalg_solve_triangular", factor, b, upper=False)
    yield e("triangular_solve", b, factor, upper=False)
    yield e("_linalg_solve_ex", positive, b)
    yield e("_linalg_solve_ex", positive, b[..., 0])
