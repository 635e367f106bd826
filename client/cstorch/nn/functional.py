"""Functions of the real API whose meaning does not depend on its kernels."""

import torch


def one_hot(array: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Returns class numbers as rows of one 1 and zeros (int64), in a new last dimension.

    Args:
        array: Class numbers, of any shape.
        num_classes: The size of the new dimension.

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
    """
    classes = torch.arange(num_classes, device=array.device)
    return (array.unsqueeze(-1) == classes).to(torch.int64)


def bias_add(input_value: torch.Tensor, bias: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns a tensor with a bias added along a dimension.

    Args:
        input_value: The tensor.
        bias: The bias, of rank 1.
        dim: The dimension.

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
    """
    behind = (input_value.dim() - 1 - dim) % input_value.dim()
    return input_value + bias.reshape(-1, *[1] * behind)


def matmul(
    weight: torch.Tensor, input_value: torch.Tensor, weight_transposed: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the product of rows with a weight.

    Args:
        weight: (outputs, inputs).
        input_value: (..., inputs).
        weight_transposed: The same weight for kernels that need it transposed; without effect here.

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
    """
    return torch.matmul(input_value, weight.t())


def sparse_matmul(input_values: torch.Tensor, input_indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns each token's products with the matrices that it chose, such as those of experts.

    All products are computed here, and the chosen ones kept.

    Args:
        input_values: An input for each choice, (..., chosen, inputs).
        input_indices: The numbers of the chosen matrices, (..., chosen).
        weight: (outputs, matrices, inputs).

    Returns:
        (..., chosen, outputs).

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
    """
    outputs, matrices, inputs = weight.shape
    every = torch.matmul(input_values, weight.reshape(outputs * matrices, inputs).t())
    every = every.reshape(*input_values.shape[:-1], outputs, matrices)
    chosen = input_indices.to(torch.int64)[..., None, None].expand(*input_values.shape[:-1], outputs, 1)
    return every.gather(-1, chosen).squeeze(-1)


def sparse_act_matmul(
    input_value: torch.Tensor, input_mask: torch.Tensor, weight: torch.Tensor, dense_capacity: int | None = None
) -> torch.Tensor:
    """Returns the product of the rows whose mask is 1 with a weight; zeros for the other rows.

    Args:
        input_value: (..., inputs).
        input_mask: 1 or 0 for each row, (...).
        weight: (outputs, inputs).
        dense_capacity: The greatest number of ones; without effect here, where all products are computed.

    Raises:
        ValueError: The mask has another shape.

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
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
    """Returns the product of the first rows of each sample with a weight; zeros for the other rows.

    Args:
        weight: (outputs, inputs).
        input_value: (batch, rows, inputs).
        num_cols: The number of rows of each sample, (batch,).
        weight_transposed: The same weight for kernels that need it transposed; without effect here.

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
    """
    row = torch.arange(input_value.shape[-2], device=input_value.device)
    is_meant = row < torch.as_tensor(num_cols).unsqueeze(-1)
    product = torch.matmul(input_value, weight.t())
    return torch.where(is_meant.unsqueeze(-1), product, torch.zeros_like(product))


def nth_order_statistic(input: torch.Tensor, k: int, dimension: int) -> torch.Tensor:
    """Returns 1 (int16) for the k largest elements along a dimension, 0 for the others.

    Args:
        input: The elements.
        k: The number of ones.
        dimension: The dimension.

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
    """
    places = input.topk(k, dimension).indices
    return torch.zeros_like(input, dtype=torch.int16).scatter(dimension, places, 1)


def conditional_arange(
    mask: torch.Tensor, start: torch.Tensor, step: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns a count where a mask is true along the last dimension, and -1 elsewhere.

    Args:
        mask: The mask.
        start: The first number.
        step: The difference of two numbers.
        dtype: The type of the result; None: that of `start` and `step`.

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
    """
    chosen = mask.bool()
    count = start + step * (chosen.cumsum(-1) - 1)
    counted = torch.where(chosen, count, -1)
    return counted if dtype is None else counted.to(dtype)


def unbind(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the slices along the first dimension.

    Args:
        tensor: The tensor.

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
    """
    return torch.unbind(tensor)


def enter_scope(input: torch.Tensor, scope_name: str) -> torch.Tensor:
    """Returns the input. On the real system a name of operations begins here.

    Args:
        input: The tensor.
        scope_name: The name.

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
    """
    return input


def exit_scope(input: torch.Tensor, scope_name: str) -> torch.Tensor:
    """Returns the input. On the real system a name of operations ends here.

    Args:
        input: The tensor.
        scope_name: The name.

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
    """
    return input


def scope_boundary(input: torch.Tensor, boundary_type: str, scope_name: str) -> torch.Tensor:
    """Returns the input. On the real system a name of operations begins or ends here.

    Args:
        input: The tensor.
        boundary_type: Whether the name begins or ends.
        scope_name: The name.

    Reference: release 2.10, `cerebras.pytorch.nn.functional`.
    """
    return input
