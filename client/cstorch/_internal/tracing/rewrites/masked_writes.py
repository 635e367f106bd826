"""`x[mask] = value` as torch.where: the written elements depend on values, but the shape of the result does not."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cstorch._internal.tracing.provenance import user_line
from cstorch._internal.tracing.tensor import known_value
from cstorch.errors import TraceError


def set_item(tensor: torch.Tensor, key: Any, value: Any) -> None:
    """`tensor[key] = value`."""
    parts = key if isinstance(key, tuple) else (key,)
    if not any(map(_is_mask, parts)):
        tensor[key] = value
        return
    form = _as_where(tensor, parts, value, accumulate=False)
    if form is None:
        tensor[key] = value
    else:
        view, new = form
        view.copy_(new)


def index_put(
    input: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """torch.index_put."""
    if not any(map(_is_mask, indices)):
        return torch.index_put(input, indices, values, accumulate)  # type: ignore[arg-type]
    return index_put_(input.clone(), indices, values, accumulate)


def index_put_(
    input: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """torch.index_put_."""
    if not any(map(_is_mask, indices)):
        return torch.index_put_(input, indices, values, accumulate)  # type: ignore[arg-type]
    parts = [slice(None) if index is None else index for index in indices]
    form = _as_where(input, parts, values, accumulate=accumulate)
    if form is None:
        return torch.index_put_(input, indices, values, accumulate)  # type: ignore[arg-type]
    view, new = form
    view.copy_(new)
    return input


def _is_mask(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)


def _as_where(
    tensor: torch.Tensor, parts: Sequence[Any], value: Any, *, accumulate: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the view of the tensor that the other indices select, and its new value.

    None: it has no such form, but the values of the masks are known, so that they can be indices.
    """
    masks = [part for part in parts if _is_mask(part)]
    if len(masks) > 1 or any(isinstance(part, (torch.Tensor, list)) and not _is_mask(part) for part in parts):
        if all(known_value(mask) is not None for mask in masks):
            return None
        raise TraceError(
            f"at {user_line()} a mask is one of several indices. Make one mask of them (`mask & other`), and write "
            "torch.where(mask, value, x) for x[mask] = value"
        )
    (mask,) = masks
    position = next(number for number, part in enumerate(parts) if part is mask)
    view = tensor[(*parts[:position], *[slice(None)] * mask.dim(), *parts[position + 1 :])]
    behind = _dimensions_behind(view, mask, parts[:position], parts[position + 1 :])
    mask = mask.to(device=tensor.device, dtype=torch.bool).reshape(*mask.shape, *[1] * behind)
    new = torch.as_tensor(value, dtype=view.dtype, device=tensor.device)
    if new.dim() > behind:
        picked = new.dim() - behind - 1
        if new.shape[picked] != 1:
            if known_value(mask) is not None:
                return None
            raise TraceError(
                f"at {user_line()} x[mask] = values has a value for each element that the mask chooses. How many those "
                "are is not known while the step is traced: write x.masked_scatter(mask, values), or torch.where with "
                "values as large as x"
            )
        new = new.reshape(*new.shape[:picked], *[1] * (mask.dim() - behind), *new.shape[picked + 1 :])
    return view, torch.where(mask, view + new if accumulate else new, view)


def _dimensions_behind(view: torch.Tensor, mask: torch.Tensor, before: Sequence[Any], after: Sequence[Any]) -> int:
    """Returns the number of dimensions of the view after those of the mask."""
    if Ellipsis in [part for part in before if part is Ellipsis]:
        return sum(not isinstance(part, int) for part in after)
    return view.dim() - mask.dim() - sum(not isinstance(part, int) for part in before)


FORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.__setitem__: set_item,
    torch.Tensor.index_put: index_put,
    torch.Tensor.index_put_: index_put_,
    torch.index_put: index_put,
    torch.index_put_: index_put_,
}
