"""Result types of the commonest operations by rule.

A test checks that they are equal to those of torch's meta kernels, which load so much Python that the first call in a
process takes over a second. A rule returns None for a case that it does not cover; the meta kernel is used then.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from waferbox.cirh.dialect.elements import element_dtype
from waferbox.cirh.dialect.spec import Site
from waferbox.cirh.dialect.types import TensorInfo

Types: TypeAlias = tuple[TensorInfo, ...] | None
Rule: TypeAlias = Callable[[Site], Types]


def given(site: Site) -> Types:
    """The given result type, which the preparation of the call has checked."""
    return site.results


def transpose(site: Site) -> Types:
    shape, dtype = site.operands[0]
    return (TensorInfo(tuple(shape[d] for d in site.statics[0].tensor().reshape(-1).tolist()), dtype),)


def matmul(site: Site) -> Types:
    (a, dtype), (b, other) = site.operands
    rows, inner = a[::-1] if site.get("transpose_a", False) else a
    second, columns = b[::-1] if site.get("transpose_b", False) else b
    if dtype is not other or inner != second or dtype is torch.bool:
        return None
    return (TensorInfo((rows, columns), dtype),)


def _mm(site: Site) -> Types:
    if len(site.operands) != 2 or any(len(operand.shape) != 2 for operand in site.operands):
        return None
    return matmul(site)


def _addmm(site: Site) -> Types:
    bias, a, b = site.operands
    if len(a.shape) != 2 or len(b.shape) != 2 or len({bias.dtype, a.dtype, b.dtype, torch.bool}) != 2:
        return None
    shape = (a.shape[0], b.shape[1])
    fits = len(bias.shape) <= 2 and all(x in (1, y) for x, y in zip(bias.shape[::-1], shape[::-1], strict=False))
    return (TensorInfo(shape, a.dtype),) if fits and a.shape[1] == b.shape[0] else None


def _bmm(site: Site) -> Types:
    (a, dtype), (b, other) = site.operands
    if len(a) != 3 or len(b) != 3 or a[0] != b[0] or a[2] != b[1] or dtype is not other or dtype is torch.bool:
        return None
    return (TensorInfo((a[0], a[1], b[2]), dtype),)


def _reduced(shape: tuple[int, ...], dims: set[int], kept: set[int]) -> tuple[int, ...]:
    return tuple(1 if d in dims else size for d, size in enumerate(shape) if d not in dims or d in kept)


def reduce(site: Site) -> Types:
    shape, dtype = site.operands[0]
    dims, kept, kind = set(site.get("dimensions")), set(site.get("keep_dims", ())), site.get("reduce_kind")
    if not dims or any(shape[d] == 0 for d in dims):
        return None
    if kind in ("ARGMAX", "ARGMIN"):
        if dtype is torch.bool:
            return None
        dtype = site.results[0].dtype if site.results else torch.int64
    elif kind not in ("ADD", "MAX", "MIN"):
        return None
    return (TensorInfo(_reduced(shape, dims, kept), dtype),)


def _dims(site: Site) -> set[int] | None:
    """The dimensions in attribute dim; all of them without the attribute."""
    rank = len(site.operands[0].shape)
    dim = site.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim or range(rank))
    if any(not -rank <= d < rank for d in dims) or len({d % rank for d in dims}) != len(dims):
        return None
    return {d % rank for d in dims}


def _float_reduction(site: Site) -> Types:
    shape, dtype = site.operands[0]
    dims = _dims(site)
    if dims is None or not dtype.is_floating_point or site.get("dtype") is not None:
        return None
    return (TensorInfo(_reduced(shape, dims, dims if site.get("keepdim", False) else set()), dtype),)


def _argmax(site: Site) -> Types:
    shape, dtype = site.operands[0]
    dims = _dims(site)
    if dims is None or dtype is torch.bool or any(shape[d] == 0 for d in dims):
        return None
    keep = dims if site.get("keepdim", False) else set()
    return (TensorInfo(_reduced(shape, dims, keep), torch.int64),)


def _triangle(site: Site) -> Types:
    """The type of a triangle of a matrix, or of each matrix of a batch."""
    return (site.operands[0],) if len(site.operands[0].shape) >= 2 else None


def _first_operand(site: Site) -> Types:
    """The type of the first operand, for a float operation along one dimension."""
    shape, dtype = site.operands[0]
    rank = len(shape)
    uniform = all(operand == site.operands[0] for operand in site.operands)
    in_range = isinstance(site.get("dim"), int) and -rank <= site.get("dim") < rank
    if not uniform or not in_range or not dtype.is_floating_point or site.get("half_to_float", False):
        return None
    if site.get("input_dtype") not in (None, _FLOAT_NAMES.get(dtype)):
        return None
    return (site.operands[0],)


_FLOAT_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}


def softmax(site: Site) -> Types:
    return (site.operands[0],) if site.operands[0].dtype.is_floating_point else None


def cross_entropy(site: Site) -> Types:
    features, labels = site.operands
    return (TensorInfo(labels.shape, features.dtype), features) if features.dtype.is_floating_point else None


def _nll(features: TensorInfo, labels: TensorInfo) -> bool:
    return (
        len(features.shape) == 2
        and labels.shape == features.shape[:1]
        and labels.dtype is torch.int64
        and features.dtype.is_floating_point
    )


def _nll_forward(site: Site) -> Types:
    if len(site.operands) != 2 or not _nll(*site.operands) or site.get("reduction") not in (0, 1, 2):
        return None
    features, labels = site.operands
    shape = labels.shape if site.get("reduction") == 0 else ()
    return TensorInfo(shape, features.dtype), TensorInfo((), features.dtype)


def _nll_backward(site: Site) -> Types:
    if site.segments != (1, 1, 1, 0, 1) or not _nll(*site.operands[1:3]) or site.get("reduction") not in (0, 1, 2):
        return None
    grad, features, labels, weight = site.operands
    losses = labels.shape if site.get("reduction") == 0 else ()
    is_known = grad == TensorInfo(losses, features.dtype) and weight == TensorInfo((), features.dtype)
    return (features,) if is_known else None


def concat(site: Site) -> Types:
    axis = site.get("axis", 0)
    first, dtype = site.operands[0]
    alike = all(
        len(o.shape) == len(first)
        and all(a == b for d, (a, b) in enumerate(zip(o.shape, first, strict=True)) if d != axis)
        for o in site.operands
    )
    if not alike:
        return None
    return (TensorInfo((*first[:axis], sum(o.shape[axis] for o in site.operands), *first[axis + 1 :]), dtype),)


def _stack(site: Site) -> Types:
    if len(set(site.operands)) != 1:
        return None
    shape, dtype = site.operands[0]
    dim = site.get("dim", 0)
    if not -len(shape) - 1 <= dim <= len(shape):
        return None
    dim %= len(shape) + 1
    return (TensorInfo((*shape[:dim], len(site.operands), *shape[dim:]), dtype),)


def split(site: Site) -> Types:
    shape, dtype = site.operands[0]
    axis = site.get("axis")
    return tuple(TensorInfo((*shape[:axis], size, *shape[axis + 1 :]), dtype) for size in site.get("split_sizes"))


def _embedding(site: Site) -> Types:
    (weight, dtype), (indices, kind) = site.operands
    if len(weight) != 2 or kind not in _INDICES:
        return None
    return (TensorInfo((*indices, weight[1]), dtype),)


def _embedding_backward(site: Site) -> Types:
    (gradient, dtype), (indices, kind) = site.operands
    if gradient[:-1] != indices or kind not in _INDICES or not dtype.is_floating_point or site.get("num_weights") < 0:
        return None
    return (TensorInfo((site.get("num_weights"), gradient[-1]), dtype),)


_INDICES = (torch.int32, torch.int64)


def _normalized(site: Site, data: int) -> bool:
    """Whether the normalised dimensions are the last ones, and all operands have one floating point type."""
    shape, dtype = site.operands[data]
    last = tuple(site.get("normalized_shape"))
    return (
        0 < len(last) <= len(shape)
        and shape[len(shape) - len(last) :] == last
        and dtype.is_floating_point
        and all(operand.dtype is dtype for operand in site.operands)
    )


def _layer_norm(site: Site) -> Types:
    """Result, mean and rstd. If all operands have one type, so have the statistics."""
    data, *others = site.operands
    if not _normalized(site, 0) or any(other.shape != tuple(site.get("normalized_shape")) for other in others):
        return None
    count = len(site.get("normalized_shape"))
    statistics = TensorInfo((*data.shape[: len(data.shape) - count], *[1] * count), data.dtype)
    return data, statistics, statistics


def _layer_norm_backward(site: Site) -> Types:
    if site.segments != (1, 1, 1, 1, 1, 1) or not _normalized(site, 1) or not all(site.get("output_mask")):
        return None
    gradient, data, mean, rstd, weight, bias = site.operands
    last = tuple(site.get("normalized_shape"))
    outer = data.shape[: len(data.shape) - len(last)]
    if gradient != data or weight.shape != last or bias.shape != last:
        return None
    if mean != rstd or mean.shape != (*outer, *[1] * len(last)):
        return None
    return data, weight, bias


def _arange(site: Site) -> Types:
    start, end, step, dtype = (site.get(name) for name in ("start", "end", "step", "dtype"))
    step = 1 if step is None else step
    if any(type(number) is not int for number in (start, end, step)) or step == 0 or (end - start) * step < 0:
        return None
    kind = torch.int64 if dtype is None else element_dtype(dtype)
    return (TensorInfo((-((start - end) // step),), kind),)


ATEN: Mapping[str, Rule] = {
    "aten.mm": _mm,
    "aten.addmm": _addmm,
    "aten.bmm": _bmm,
    "aten.mean": _float_reduction,
    "aten.mean.dim": _float_reduction,
    "aten.linalg_vector_norm": _float_reduction,
    "aten.argmax": _argmax,
    "aten.argmin": _argmax,
    "aten.tril": _triangle,
    "aten.triu": _triangle,
    "aten._softmax": _first_operand,
    "aten._log_softmax": _first_operand,
    "aten._softmax_backward_data": _first_operand,
    "aten._log_softmax_backward_data": _first_operand,
    "aten.nll_loss_forward": _nll_forward,
    "aten.nll_loss_backward": _nll_backward,
    "aten.stack": _stack,
    "aten.arange.start_step": _arange,
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.native_layer_norm": _layer_norm,
    "aten.native_layer_norm_backward": _layer_norm_backward,
}
