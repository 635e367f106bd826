"""Results of a kernel that show memory which somebody else is going to write."""

from collections.abc import Sequence

import torch

from cirh.execution.kernel import span


def clone_views(
    results: list[torch.Tensor], places: Sequence[torch.Tensor | None], shown: Sequence[torch.Tensor]
) -> None:
    """Replaces each result that has no place of its own and shares memory with one of these tensors by a copy."""
    spans = [span(tensor) for tensor in shown]
    for index, (result, place) in enumerate(zip(results, places, strict=True)):
        if place is None:
            begin, end = span(result)
            if any(first < end and begin < last for first, last in spans):
                results[index] = result.clone()
