"""Sums of micro-batches that are not sent from where they lie: they share no memory with anything that is read."""

from collections.abc import Sequence

import torch

from wafer.joins import adding, beside_inputs
from wafer.kernels import WaferKernel


def kernel_of(*results: torch.Tensor) -> WaferKernel:
    def call(inputs: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        return list(results)

    return call


def test_what_is_shown_elsewhere_is_copied_and_only_that() -> None:
    given, made = torch.ones(4, 4), torch.ones(4, 4)
    spread = torch.ones(1, 4).expand(4, 4)
    kernel = beside_inputs(kernel_of(given.t(), made, spread, made[1:]), [0, 2])
    shown, whole, wide, part = kernel([given], [None] * 4)
    shown.add_(1)
    wide.add_(1)
    assert torch.equal(given, torch.ones(4, 4))
    assert torch.equal(wide, torch.full((4, 4), 2.0))
    assert whole is made
    assert part.data_ptr() == made[1:].data_ptr()
    own = torch.zeros(3)
    (kept,) = beside_inputs(kernel_of(own), [0])([given], [None])
    assert kept is own
    first, _ = beside_inputs(kernel_of(made, made[1:]), [0])([given], [None, None])
    assert first is not made


def test_later_micro_batches_add_in_place() -> None:
    total, other = torch.tensor([1.0, 2.0]), torch.zeros(1)
    results = adding(kernel_of(other, torch.tensor([10.0, 20.0])), {1: 3}, [None, None, None, total])([], [None, None])
    assert results[0] is other
    assert results[1] is total
    assert total.tolist() == [11.0, 22.0]
