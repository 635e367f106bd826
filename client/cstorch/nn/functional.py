"""Functions of the real API whose meaning does not depend on its kernels."""

import torch


def one_hot(array: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Class numbers as rows of one 1 and zeros (int64), in a new last dimension."""
    classes = torch.arange(num_classes, device=array.device)
    return (array.unsqueeze(-1) == classes).to(torch.int64)


def bias_add(input_value: torch.Tensor, bias: torch.Tensor, dim: int) -> torch.Tensor:
    """Adds a bias (rank 1) along a dimension."""
    behind = (input_value.dim() - 1 - dim) % input_value.dim()
    return input_value + bias.reshape(-1, *[1] * behind)


def matmul(
    weight: torch.Tensor, input_value: torch.Tensor, weight_transposed: torch.Tensor | None = None
) -> torch.Tensor:
    """The product of rows (..., inputs) with a weight (outputs, inputs). `weight_transposed` is the same weight, for
    kernels that want it so."""
    return torch.matmul(input_value, weight.t())


def sparse_matmul(input_values: torch.Tensor, input_indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each token's products with the matrices that it chose: of experts, the best few.

    Args:
        input_values: (..., chosen, inputs), an input for each choice.
        input_indices: (..., chosen), which matrices.
        weight: (outputs, matrices, inputs).

    Returns:
        (..., chosen, outputs). All products are computed here, and the chosen ones kept.
    """
    outputs, matrices, inputs = weight.shape
    every = torch.matmul(input_values, weight.reshape(outputs * matrices, inputs).t())
    every = every.reshape(*input_values.shape[:-1], outputs, matrices)
    chosen = input_indices.to(torch.int64)[..., None, None].expand(*input_values.shape[:-1], outputs, 1)
    return every.gather(-1, chosen).squeeze(-1)


def sparse_act_matmul(
    input_value: torch.Tensor, input_mask: torch.Tensor, weight: torch.Tensor, dense_capacity: int | None = None
) -> torch.Tensor:
    """The product with a weight (outputs, inputs) of those rows (..., inputs) whose mask (...) is 1; zeros elsewhere.

    dense_capacity: how many ones there are at most. All products are computed here, so it does not matter.

    Raises ValueError for a mask of another shape.
    """
    if input_value.shape[:-1] != input_mask.shape:
        raise ValueError(
            f"input_mask is {tuple(input_mask.shape)}, not {tuple(input_value.shape[:-1])}: it has a number for each "
            "row of input_value"
        )
    product = torch.matmul(input_value, weight.t())
    return product * input_mask.unsqueeze(-1).to(product.dtype)


def ranged_matmul(
    weight: torch.Tensor,
    input_value: torch.Tensor,
    num_cols: torch.Tensor,
    weight_transposed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of rows (batch, rows, inputs) with a weight (outputs, inputs): of each sample the first `num_cols`
    rows, zeros behind. `weight_transposed` is the same weight, for kernels that want it so."""
    row = torch.arange(input_value.shape[-2], device=input_value.device)
    is_meant = row < torch.as_tensor(num_cols).unsqueeze(-1)
    product = torch.matmul(input_value, weight.t())
    return torch.where(is_meant.unsqueeze(-1), product, torch.zeros_like(product))


def nth_order_statistic(input: torch.Tensor, k: int, dimension: int) -> torch.Tensor:
    """1 (int16) for the k largest elements along a dimension, 0 for the others."""
    places = input.topk(k, dimension).indices
    return torch.zeros_like(input, dtype=torch.int16).scatter(dimension, places, 1)


def conditional_arange(
    mask: torch.Tensor, start: torch.Tensor, step: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Counts, from a number in steps of another, where a mask is true along the last dimension; -1 elsewhere."""
    chosen = mask.bool()
    count = start + step * (chosen.cumsum(-1) - 1)
    counted = torch.where(chosen, count, -1)
    return counted if dtype is None else counted.to(dtype)


def unbind(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The slices along the first dimension."""
    return torch.unbind(tensor)


def enter_scope(input: torch.Tensor, scope_name: str) -> torch.Tensor:
    """The input. In the real system a name begins here that only its kernels and reports know."""
    return input


def exit_scope(input: torch.Tensor, scope_name: str) -> torch.Tensor:
    """The input: a name ends here."""
    return input


def scope_boundary(input: torch.Tensor, boundary_type: str, scope_name: str) -> torch.Tensor:
    """The input: a name begins or ends here."""
    return input
