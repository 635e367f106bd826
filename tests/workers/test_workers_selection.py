"""Which batches and rows a worker takes, without any process."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch

from workers.child import batches
from workers.child.batches import Selection, endless
from workers.child.failures import InputFailure
from workers.child.loader_state import Position

ROWS = 4


def batch(number: int, rows: int = ROWS) -> dict[str, Any]:
    """Values that say which row of which batch they are; and a string, as collate functions leave them."""
    x = number * 100 + torch.arange(rows, dtype=torch.float32).reshape(rows, 1)
    return {"x": x, "y": torch.arange(rows), "name": "b"}


def members(rows: int, micro_batches: int) -> list[dict[str, Any]]:
    numbers = {"dtype": "float32", "shape": [rows, 1], "offset": 0}
    labels = {"dtype": "int64", "shape": [rows], "offset": 64}
    return [numbers] * micro_batches + [labels] * micro_batches


def selection(
    *,
    wafer: int = 0,
    worker: int = 0,
    num_workers: int = 1,
    num_csx: int = 1,
    micro_batches: int = 1,
    redivided: bool = False,
    input_names: Sequence[str] = (),
) -> Selection:
    local = ROWS // num_csx
    return Selection(
        {
            "wafer": wafer,
            "worker": worker,
            "num_workers": num_workers,
            "input_names": list(input_names),
            "redivided": redivided,
            "vendor_builder": False,
        },
        {
            "members": members(local // micro_batches, micro_batches),
            "global_rows": ROWS,
            "local_rows": local,
            "micro_batches": micro_batches,
        },
        "input_fn (train.py:7)",
    )


def own(selected: Selection, batches: Iterator[Any]) -> Iterator[list[torch.Tensor]]:
    """What is selected while nobody wants the loader's state."""
    return selected.own(batches, Position(None, None, {"vendor_builder": False}, []))


def first_column(tensors: list[torch.Tensor]) -> list[float]:
    return tensors[0].flatten().tolist()


def test_workers_deal_out_batches_and_wafers_cut_rows() -> None:
    taken = {}
    for wafer in range(2):
        for worker in range(3):
            chosen = selection(wafer=wafer, worker=worker, num_workers=3, num_csx=2)
            taken[wafer, worker] = [first_column(tensors) for tensors in own(chosen, (batch(n) for n in range(7)))]
    assert taken[0, 0] == [[0, 1], [300, 301], [600, 601]]
    assert taken[1, 0] == [[2, 3], [302, 303], [602, 603]]
    assert taken[1, 2] == [[202, 203], [502, 503]]


def test_rows_are_divided_into_micro_batches_tensor_by_tensor() -> None:
    (taken,) = own(selection(wafer=1, num_csx=2, micro_batches=2), iter([batch(3)]))
    assert [tensor.flatten().tolist() for tensor in taken] == [[302], [303], [2], [3]]
    (whole,) = own(selection(micro_batches=2), iter([batch(0)]))
    assert [tensor.flatten().tolist() for tensor in whole] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_batches_of_one_wafers_rows_are_taken_as_they_are() -> None:
    chosen = selection(wafer=1, worker=1, num_workers=2, num_csx=2)
    assert [first_column(tensors) for tensors in own(chosen, (batch(n, 2) for n in range(3)))] == [
        [0, 1],
        [100, 101],
        [200, 201],
    ]


def test_on_one_wafer_an_input_fn_that_asks_for_its_rank_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_rank_was_asked", lambda: True)
    chosen = selection(worker=1, num_workers=2)
    assert [first_column(tensors)[0] for tensors in own(chosen, (batch(n) for n in range(2)))] == [0, 100]


def test_whole_batches_are_divided_among_the_wafers_that_are_left() -> None:
    (whole,) = own(selection(redivided=True), iter([batch(0)]))
    assert first_column(whole) == [0, 1, 2, 3]


@pytest.mark.parametrize(("num_csx", "asks"), [(2, False), (1, True)], ids=["rows of one wafer", "asks for its rank"])
def test_parts_that_an_input_fn_has_made_are_not_divided_anew(
    monkeypatch: pytest.MonkeyPatch, num_csx: int, asks: bool
) -> None:
    monkeypatch.setattr(batches, "_rank_was_asked", lambda: asks)
    with pytest.raises(InputFailure, match=r"lost wafers.*input_fn \(train.py:7\) cannot be divided.*min_num_csx"):
        next(own(selection(num_csx=num_csx, redivided=True), iter([batch(0, ROWS // num_csx)])))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (batch(0, 3), r"batch 0 of the input_fn input_fn \(train.py:7\) has 3 rows, .* compiled for 4.*drop_last=True"),
        ({"x": torch.zeros(4, 1)}, "has 1 tensors, but the step was compiled for 2"),
        (
            {"x": torch.zeros(4, 1), "y": torch.zeros(3)},
            r"first dimension, the batch: \(4, 1\), \(3,\)",
        ),
        ({"x": torch.zeros(4, 1), "y": torch.tensor(3)}, "differ in their first dimension"),
        (
            {"x": torch.zeros(4, 1, dtype=torch.float64), "y": torch.zeros(4, dtype=torch.int64)},
            r"tensor 0 of batch 0 .* float64 with \[1\] per sample, but the step was compiled for float32 with \[1\]",
        ),
        ({"x": torch.zeros(4, 2), "y": torch.zeros(4, dtype=torch.int64)}, r"float32 with \[2\] per sample"),
    ],
)
def test_bad_batches(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(InputFailure, match=message):
        next(own(selection(), iter([bad])))


def of_graphs() -> Selection:
    nodes = {"dtype": "float32", "shape": [5, 2], "offset": 0}
    edges = {"dtype": "int64", "shape": [2, 7], "offset": 64}
    return Selection(
        {
            "wafer": 0,
            "worker": 1,
            "num_workers": 2,
            "input_names": [],
            "redivided": False,
            "vendor_builder": False,
        },
        {"members": [nodes, edges], "global_rows": 1, "local_rows": 1, "micro_batches": 1},
        "input_fn (train.py:7)",
    )


def graph(nodes: int = 5, edges: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((nodes, 2), float(nodes)), torch.full((2, edges), edges)


def test_tensors_that_differ_in_dimension_0_are_not_divided() -> None:
    taken = list(own(of_graphs(), iter([graph(), graph(), graph(), graph()])))
    assert [[tuple(tensor.shape) for tensor in tensors] for tensors in taken] == [[(5, 2), (2, 7)]] * 2


@pytest.mark.parametrize("bad", [graph(nodes=4), graph(edges=8), graph(nodes=2)])
def test_graphs_of_other_sizes_than_the_first(bad: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(InputFailure, match=r"batch 1 .*was compiled for .*fill up the tensors of each batch"):
        list(own(of_graphs(), iter([graph(), bad])))


def test_a_loader_is_iterated_again() -> None:
    assert list(islice(endless([1, 2, 3], 1), 8)) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_loaders_that_run_dry() -> None:
    def generate() -> Iterator[int]:
        yield from range(3)

    seen: list[int] = []
    with pytest.raises(InputFailure, match="ran dry after 3 batches"):
        seen.extend(endless(generate(), 1))
    batches = endless(generate(), 1)
    assert list(islice(batches, 3)) == [0, 1, 2]
    with pytest.raises(InputFailure, match="ran dry after 0 batches"):
        next(endless([], 1))

    class Once:
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter([1, 2] if self.passes == 1 else [])

    batches = endless(Once(), 1)
    assert list(islice(batches, 2)) == [1, 2]
    with pytest.raises(InputFailure, match="ran dry after 2 batches"):
        next(batches)


def test_tensors_are_taken_by_name_in_the_order_of_the_step_and_with_its_element_types() -> None:
    given = {
        "y": torch.arange(ROWS, dtype=torch.int32),
        "unused": torch.zeros(ROWS),
        "deep": [torch.ones(ROWS, 1).double()],
    }
    (taken,) = own(selection(input_names=["input_deep_0", "input_y"]), iter([given]))
    assert [tensor.dtype for tensor in taken] == [torch.float32, torch.int64]
    assert torch.equal(taken[1], torch.arange(ROWS))


def test_a_batch_without_a_tensor_that_the_step_takes_is_refused() -> None:
    chosen = selection(input_names=["input_deep_0", "input_y"])
    with pytest.raises(InputFailure, match=r"batch 0 of .* has no tensor 'input_deep_0', but \['input_x', 'input_y'\]"):
        list(own(chosen, iter([batch(0)])))


def test_numbers_do_not_become_other_numbers_unasked() -> None:
    chosen = selection(input_names=["input_x", "input_y"])
    with pytest.raises(InputFailure, match="float32"):
        list(own(chosen, iter([{"x": torch.zeros(ROWS, 1), "y": torch.zeros(ROWS)}])))
