"""The mask of the highest elements, whose number is known only at run time."""

import torch


def mask_from_topk(input: torch.Tensor, k: torch.Tensor, dimension: int) -> torch.Tensor:
    """The mask of the k highest elements along a dimension; among equal elements the first ones.

    Args:
        input: the elements. NaN is higher than any number.
        k: integers, of rank 0 or with size 1 in the dimension. A k below 1 chooses none, and a k from the dimension's
            size on chooses all; both cost nothing.
        dimension: number of the dimension.
    """
    rows = input.movedim(dimension, -1)
    counts = (k.movedim(dimension, -1) if k.dim() else k).expand(*rows.shape[:-1], 1)
    mask = torch.zeros(rows.shape, dtype=torch.bool)
    flat = mask.view(-1, rows.shape[-1])
    for number, (row, count) in enumerate(zip(rows.reshape(flat.shape), counts.reshape(-1).tolist(), strict=True)):
        flat[number] = _highest(row, min(int(count), len(row)))
    return mask.movedim(-1, dimension)


def _highest(row: torch.Tensor, count: int) -> torch.Tensor:
    if count < 1 or count == len(row):
        return torch.full(row.shape, count >= 1)
    last = torch.kthvalue(row, len(row) - count + 1).values
    if last.isnan():
        above, equal = torch.zeros(row.shape, dtype=torch.bool), row.isnan()
    else:
        above, equal = (row > last) | row.isnan(), row == last
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))
