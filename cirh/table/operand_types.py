"""Which element types an operation takes together: torch's kernels refuse what its meta kernels let pass."""

import torch

from cirh.dialect.errors import CirhError
from cirh.dialect.spec import Site

# Statistics, or weights, may be of another floating point type than the rest.
_MIXED = frozenset(
    {
        "aten.native_layer_norm",
        "aten.native_layer_norm_backward",
        "aten.native_group_norm",
        "aten.native_group_norm_backward",
        "aten._native_batch_norm_legit_functional",
        "aten._native_batch_norm_legit.no_stats",
        "aten._native_batch_norm_legit_no_training",
        "aten.native_batch_norm_backward",
        "cirh.AttentionGrad",
    }
)
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
    if len(floats) > 1 and site.name not in _MIXED:
        listed = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floats))
        raise CirhError(f"{site.name}: operands of different types ({listed}); cast them to one first")
    labels = _LABELS.get(site.name)
    if labels is not None and labels < len(site.operands) and site.operands[labels].dtype not in _CLASS_NUMBERS:
        raise CirhError(f"{site.name}: class numbers are int64, not {site.operands[labels].dtype}; cast them first")
