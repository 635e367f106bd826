"""What tests of summaries share: a writer that keeps them, an input, and what a fake cluster makes of each step."""

import torch
from fake_cluster import State


class Writer:
    """Takes what a summary writer takes."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.tensors: list[tuple[str, list[float], int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_tensor(self, name: str, tensor: torch.Tensor, step: int) -> None:
        self.tensors.append((name, tensor.tolist(), step))


def input_fn() -> list[torch.Tensor]:
    return [torch.ones(4, 2), torch.full((4, 2), 3.0)]


def count(state: State, step: int) -> dict[str, torch.Tensor]:
    return {"output_scalar": torch.tensor(float(step)), "output_values_0": torch.tensor(-float(step))}
