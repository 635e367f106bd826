"""Products of half precision tensors with weights in float32: the weights are cast, as on the real system.

torch raises an error for operands of different types. Here the float32 operands are cast to the half type, above
autograd, so that their gradients are cast back. Losses of a half and a float32 tensor are computed in float32, as in
torch.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

_HALVES = (torch.float16, torch.bfloat16)
_NAMES = """
    matmul mm bmm mv dot inner addmm addmv addbmm baddbmm einsum tensordot bilinear
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu
"""
_METHODS = "matmul __matmul__ __rmatmul__ mm bmm mv dot inner addmm addmv addbmm baddbmm addmm_ baddbmm_ prelu"
_LOSSES = (functional.mse_loss, functional.smooth_l1_loss)
_FUNCTIONALS = "linear bilinear multi_head_attention_forward scaled_dot_product_attention cross_entropy nll_loss"


def in_one_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with float32 operands cast to the half type, if there are operands of one half type."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kinds = {leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        halves = kinds.intersection(_HALVES)
        if torch.float32 not in kinds or len(halves) != 1:
            return function(*args, **kwargs)
        (half,) = halves

        def follow(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(half) if tensor.dtype is torch.float32 else tensor

        args, kwargs = pytree.tree_map_only(torch.Tensor, follow, (args, kwargs))
        return function(*args, **kwargs)

    return call


def in_widest_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with both operands cast to the type to which torch promotes them."""

    @wraps(function)
    def call(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.promote_types(input.dtype, target.dtype)
        return function(input.to(dtype), target.to(dtype), *args, **kwargs)

    return call


def _forms() -> dict[Callable[..., Any], Callable[..., Any]]:
    functions: list[Callable[..., Any]] = [
        *(getattr(torch, name) for name in _NAMES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        *(getattr(functional, name) for name in _FUNCTIONALS.split()),
    ]
    return {
        **{function: in_one_type(function) for function in functions},
        **{function: in_widest_type(function) for function in _LOSSES},
    }


FORMS = _forms()
