"""Operators of torch's own table, one sample each, of those that models use most: the short form of `make opinfo`."""

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from operator_case import difference, results_of, variants_of
from operator_samples import name_of, operators, samples, tensors_of

pytestmark = pytest.mark.parity

_MOST_USED = """
    add sub mul div.no_rounding_mode pow exp log sqrt rsqrt tanh sigmoid abs neg clamp where masked_fill maximum minimum
    sum mean amax argmax var std norm cumsum logsumexp softmax log_softmax prod median std_mean
    matmul mm bmm addmm baddbmm einsum nn.functional.linear nn.functional.conv2d
    reshape permute transpose expand squeeze unsqueeze cat stack split chunk unbind narrow select flip roll repeat
    gather scatter scatter_add scatter_reduce.amax index_select index_add index_copy index_fill index_put take_along_dim
    masked_scatter unfold diagonal diag_embed tril triu trace linspace
    nn.functional.gelu nn.functional.silu nn.functional.relu nn.functional.glu nn.functional.prelu nn.functional.celu
    nn.functional.softplus nn.functional.layer_norm nn.functional.group_norm nn.functional.embedding
    nn.functional.cross_entropy nn.functional.nll_loss nn.functional.mse_loss nn.functional.max_pool2d
    nn.functional.avg_pool2d nn.functional.pad.constant nn.functional.cosine_similarity
    topk sort bucketize searchsorted histc take put nonzero_static isin cdist logaddexp fmax fmin nansum
    polygamma.polygamma_n_0
    linalg.inv linalg.solve linalg.solve_triangular linalg.cholesky linalg.qr linalg.svd linalg.eigh linalg.slogdet
    linalg.pinv matrix_exp fft.rfft nonzero
"""


@functools.cache
def _table() -> Mapping[str, Any]:
    """By name: seconds of imports, so not where tests are only collected."""
    return {name_of(operator): operator for operator in operators(torch.float32)}


@pytest.mark.parametrize("name", _MOST_USED.split())
def test_operator(name: str) -> None:
    """It gives torch's numbers, or an error that says what is not supported, and where."""
    operator = _table()[name]
    ((_, sample),) = samples(operator, torch.float32, 1)
    backward = operator.supports_autograd and any(tensor.is_floating_point() for tensor in tensors_of(sample))
    for variant in variants_of(operator, sample, first=False):
        results = results_of(operator, sample, variant, backward=backward)
        assert {verdict for verdict, _ in results.values()} <= {"exact", "rounded", "random", "refused"}, (
            variant,
            results,
        )


def test_the_comparison_notices() -> None:
    tensor = torch.tensor([1.0, torch.inf, torch.nan])
    assert not difference(tensor, tensor, 0)
    assert "differ by" in difference(tensor, torch.tensor([2.0, torch.inf, torch.nan]), 1e-5)
    assert "infinities" in difference(tensor, torch.tensor([1.0, -torch.inf, torch.nan]), 1e-5)
    assert "infinities" in difference(torch.tensor([torch.nan]), torch.tensor([1.0]), 1e-5)
    assert "shape" in difference(tensor, tensor[:2], 1e-5)
    assert "type" in difference(tensor, tensor.double(), 1e-5)
