"""Examples of special functions, of order statistics, and of what searches and scatters."""

from collections.abc import Iterator
from typing import Any

import torch


def special_examples(e: Any) -> Iterator[Any]:
    """`e` makes an example of an operation of ATen."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.rand(3, 4, generator=generator) * 0.8 + 0.1 for _ in range(2))
    unary = (
        "lgamma digamma erfinv asinh atanh i0 special_ndtri special_log_ndtr special_erfcx special_i0e special_i1"
        " special_i1e special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1"
        " special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1"
        " special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0"
    )
    for name in unary.split():
        yield e(name, a)
    yield e("acosh", a + 1)
    yield e("angle", a - 0.5)
    for name in ("softshrink_backward", "hardshrink_backward"):
        yield e(name, a, b, lambd=0.5)
    yield e("polygamma", a, n=1)
    for name in ("fmax", "fmin", "copysign.Tensor", "nextafter", "igamma", "igammac", "special_xlog1py", "hypot"):
        yield e(name, a, b)
    yield e("special_zeta", a + 1, b)
    yield e("_standard_gamma_grad", a, b)
    yield e("_dirichlet_grad", a, b, a + b)
    chebyshev = [f"{shift}chebyshev_polynomial_{kind}" for shift in ("", "shifted_") for kind in "tuvw"]
    others = ("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p")
    for name in (*chebyshev, *others):
        yield e(f"special_{name}", a, (3 * b).floor())
        yield e(f"special_{name}.n_scalar", a, n=2)
    for name in ("median", "nanmedian"):
        yield e(name, a)
        yield e(f"{name}.dim", a, dim=1)
    yield e("mode", a, dim=1)
    for name in ("cummax", "cummin", "logcumsumexp"):
        yield e(name, a, dim=1)
    at = torch.tensor([[0, 1], [3, 2], [0, 0]])
    yield e("scatter_reduce.two", a, at, b[:, :2], dim=1, reduce="amax")
    yield e("index_reduce", a, torch.tensor([0, 2]), b[:2], dim=0, reduce="prod")
    boundaries = torch.tensor([0.2, 0.4, 0.6])
    yield e("bucketize.Tensor", a, boundaries)
    yield e("searchsorted.Tensor", a.sort(1).values, b, operand_segments=[1, 1, 0])
    yield e("searchsorted.Tensor", boundaries, b, operand_segments=[1, 1, 0])
    volume, grid = torch.rand(1, 2, 3, 3, 3, generator=generator), torch.rand(1, 2, 2, 2, 3, generator=generator)
    sampling = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": False}
    yield e("grid_sampler_3d", volume, grid, **sampling)
    masks = {"output_mask": [True, True]}
    yield e("grid_sampler_3d_backward", torch.ones(1, 2, 2, 2, 2), volume, grid, **sampling, **masks)
