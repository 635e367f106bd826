"""Which elements are the highest, where their number is known only when this runs."""

import torch


def mask_from_topk(input: torch.Tensor, k: torch.Tensor, dimension: int) -> torch.Tensor:
    """The mask of the k highest elements along a dimension; of equal ones the first.

    k: integers, of rank 0 or with size 1 in the dimension. None are chosen below 1, all from the dimension's size on;
        both cost nothing. NaN is higher than any number.
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
