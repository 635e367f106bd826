"""Which element types an operation takes together: torch's kernels refuse what its meta kernels let pass."""

import torch

from cirh.dialect.elements import element_dtype
from cirh.dialect.errors import CirhError
from cirh.dialect.spec import Site

# Norms: what is normalised, and its gradient, stand first. If these are halves, weights and statistics may be float32.
_NORMALISED = {
    "aten.native_layer_norm": 1,
    "aten.native_layer_norm_backward": 2,
    "aten._native_batch_norm_legit_functional": 1,
    "aten._native_batch_norm_legit.no_stats": 1,
    "aten._native_batch_norm_legit_no_training": 1,
    "aten.native_batch_norm_backward": 2,
}
_HALVES = (torch.float16, torch.bfloat16)
# Its call knows which type each operand has to have.
_CHECKED = frozenset({"cirh.AttentionGrad"})
# Where the class numbers stand.
_LABELS = {
    "aten.nll_loss_forward": 1,
    "aten.nll_loss2d_forward": 1,
    "aten.nll_loss_backward": 2,
    "aten.nll_loss2d_backward": 2,
}
_CLASS_NUMBERS = (torch.int64, torch.uint8)


def check_operand_types(site: Site) -> None:
    """Raises CirhError for operands that do not fit together, of an operation that does not go element by element."""
    floats = {operand.dtype for operand in site.operands if operand.dtype.is_floating_point}
    if len(floats) > 1 and site.name not in _CHECKED and not _is_norm_of_halves(site):
        listed = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floats))
        raise CirhError(f"{site.name}: operands of different types ({listed}); cast them to one first")
    named = site.get("input_dtype")
    if named is not None and element_dtype(named) is not site.operands[0].dtype:
        raise CirhError(f"{site.name}: the gradient of {named} is not {site.operands[0].dtype}; cast it first")
    labels = _LABELS.get(site.name)
    if labels is not None and labels < len(site.operands) and site.operands[labels].dtype not in _CLASS_NUMBERS:
        raise CirhError(f"{site.name}: class numbers are int64, not {site.operands[labels].dtype}; cast them first")


def _is_norm_of_halves(site: Site) -> bool:
    """Whether halves are normalised, and all else is float32."""
    first = _NORMALISED.get(site.name, 0)
    data, others = ({operand.dtype for operand in part} for part in (site.operands[:first], site.operands[first:]))
    return len(data) == 1 and data.issubset(_HALVES) and others == {torch.float32}
