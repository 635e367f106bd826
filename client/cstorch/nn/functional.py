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
