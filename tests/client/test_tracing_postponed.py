"""A process that runs no step makes no value of a large tensor, unless the script reads it."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from cstorch._internal.tracing import DEVICE, purpose
from cstorch._internal.tracing.cell import Cell

SIZE = 160  # squared, large enough for the spool


@pytest.fixture(autouse=True)
def _no_step() -> Iterator[None]:
    with mock.patch.object(purpose, "runs_steps", False):
        yield


@pytest.fixture
def spooled(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells whose bytes were used."""
    found: list[Cell] = []
    local = Cell._local

    def used(cell: Cell) -> torch.Tensor:
        if cell.nbytes >= 1 << 16:
            found.append(cell)
        return local(cell)

    monkeypatch.setattr(Cell, "_local", used)
    return found


def test_an_orthogonal_initialisation_is_not_run(spooled: list[Cell]) -> None:
    weight = torch.empty(SIZE, SIZE, device=DEVICE)
    nn.init.orthogonal_(weight)
    assert not spooled
    value = weight.cpu()
    torch.testing.assert_close(value @ value.t(), torch.eye(SIZE), rtol=1e-4, atol=1e-4)


def test_weight_norm_and_copies_are_not_run(spooled: list[Cell]) -> None:
    layer = nn.Linear(SIZE, SIZE, device=DEVICE)
    normed = nn.utils.parametrizations.weight_norm(layer)
    other = torch.empty(SIZE, SIZE, device=DEVICE)
    with torch.no_grad():
        other.copy_(normed.weight)
        other[3:9] *= torch.sign(other[3:9])
    assert not spooled
    torch.testing.assert_close(other[3:9].cpu(), normed.weight.cpu()[3:9].abs())
    torch.testing.assert_close(other[9:].cpu(), normed.weight.cpu()[9:])


def test_changes_are_in_the_order_of_the_script() -> None:
    first = torch.full((SIZE, SIZE), 2.0, device=DEVICE)
    product = first @ first
    with torch.no_grad():
        product.sub_(1.0)
        second = product.sign().cumsum(0)
        second[0].copy_(product[1])
    assert second[:2].cpu()[:, 0].tolist() == [4.0 * SIZE - 1, 2.0]


def test_a_value_whose_source_has_changed_cannot_be_read() -> None:
    first = torch.full((SIZE, SIZE), 2.0, device=DEVICE)
    product = first @ first
    first.fill_(1.0)
    with pytest.raises(RuntimeError, match="compile_only"):
        product.cpu()
