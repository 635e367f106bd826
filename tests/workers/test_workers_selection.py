"""Which batches and rows a worker takes, without any process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from input_messages import layout_of, prepare_of

from waferbox.input_process import batches
from waferbox.input_process.batches import Selection, endless
from waferbox.input_process.failures import InputFailure
from waferbox.input_process.loader import Position
from waferbox.input_process.messages import Channel, TensorLayout

ROWS = 4


def batch(number: int, rows: int = ROWS) -> dict[str, Any]:
    """Values that say which row of which batch they are; and a string, as collate functions leave them."""
    x = number * 100 + torch.arange(rows, dtype=torch.float32).reshape(rows, 1)
    return {"x": x, "y": torch.arange(rows), "name": "b"}


def members(rows: int, micro_batches: int) -> list[TensorLayout]:
    numbers = TensorLayout(dtype="float32", shape=(rows, 1), offset=0)
    labels = TensorLayout(dtype="int64", shape=(rows,), offset=64)
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
    rows: int = ROWS,
) -> Selection:
    local = rows // num_csx
    prepare = prepare_of(
        wafer=wafer,
        worker=worker,
        num_workers=num_workers,
        num_csx=num_csx,
        redivided=redivided,
        input_names=tuple(input_names),
    )
    layout = layout_of(members(local // micro_batches, micro_batches), rows, local, micro_batches)
    return Selection(prepare, layout, "input_fn (train.py:7)")


def own(selected: Selection, batches: Iterator[Any]) -> Iterator[list[torch.Tensor]]:
    """What is selected while nobody wants the loader's state."""
    nobody = cast("Channel", None)  # to whom nothing is sent
    return selected.own(batches, Position(None, nobody, prepare_of(), []))


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


def test_parts_of_an_input_fn_that_asks_for_its_share_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_share_was_asked", lambda: True)
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


@pytest.mark.parametrize(
    ("num_csx", "asks_for_rank"), [(2, False), (1, True)], ids=["rows of one wafer", "asks for its rank"]
)
def test_parts_that_an_input_fn_has_made_are_not_divided_anew(
    monkeypatch: pytest.MonkeyPatch, num_csx: int, asks_for_rank: bool
) -> None:
    monkeypatch.setattr(batches, "_rank_was_asked", lambda: asks_for_rank)
    monkeypatch.setattr(batches, "_share_was_asked", lambda: True)
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


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_last_batch_with_the_rows_of_one_wafer_is_no_part_of_a_batch(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, asks: bool
) -> None:
    monkeypatch.setattr(batches, "_share_was_asked", lambda: asks)
    for wafer in range(2):
        taken = own(selection(wafer=wafer, num_csx=2, num_workers=num_workers), iter([batch(0), batch(1, 2)]))
        assert first_column(next(taken)) == [2 * wafer, 2 * wafer + 1]
        with pytest.raises(
            InputFailure, match=r"batch 1 .* has 2 rows, .* for 4, those of the first: .*drop_last=True"
        ):
            next(taken)


def test_a_first_batch_with_the_rows_of_one_wafer_is_one_only_if_the_input_fn_asks() -> None:
    """It may be the rest of a pass, with which an execution that was resumed begins."""
    expected = r"batch 0 .* has 2 rows, .* an input_fn that makes .*get_streaming_batch_size"
    with pytest.raises(InputFailure, match=expected):
        next(own(selection(num_csx=2), iter([batch(0, 2), batch(1)])))


def test_all_parts_of_an_input_fn_that_shards_have_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_share_was_asked", lambda: True)
    for rows in (1, 4):
        taken = own(selection(num_csx=2), iter([batch(0, 2), batch(1, rows)]))
        assert first_column(next(taken)) == [0, 1]
        with pytest.raises(InputFailure, match=f"batch 1 .* has {rows} rows, .* for 4, .* each wafer has 2"):
            next(taken)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """Wafers, workers of each, micro-batches (those of all replicas), the rows of a batch, and samples of a pass."""
    num_csx, num_workers, micro_batches = (draw(st.integers(1, most)) for most in (4, 3, 4))
    rows = num_csx * micro_batches * draw(st.integers(1, 3))
    return num_csx, num_workers, micro_batches, rows, draw(st.integers(rows, 4 * rows))


def supplied(
    loaders: Mapping[tuple[int, int], Iterable[Any]], micro_batches: int, rows: int, num_steps: int
) -> tuple[list[list[int]], bool]:
    """The samples of each step until the first that a worker refuses, and whether one has."""
    num_csx, num_workers = (1 + max(place[axis] for place in loaders) for axis in range(2))
    workers = {
        (wafer, worker): own(
            selection(
                wafer=wafer,
                worker=worker,
                num_csx=num_csx,
                num_workers=num_workers,
                micro_batches=micro_batches,
                rows=rows,
            ),
            endless(loader, num_workers),
        )
        for (wafer, worker), loader in loaders.items()
    }
    steps: list[list[int]] = []
    for step in range(num_steps):
        parts = []
        for wafer in range(num_csx):
            try:
                tensors = next(workers[wafer, step % num_workers])
            except InputFailure as failure:
                return steps, "drop_last=True" in str(failure)
            assert {len(tensor) for tensor in tensors} == {rows // num_csx // micro_batches}
            numbers, labels = tensors[:micro_batches], tensors[micro_batches:]
            assert torch.equal(torch.cat(numbers).flatten().long(), torch.cat(labels))
            parts += torch.cat(labels).tolist()
        steps.append(parts)
    return steps, False


@given(divisions())
def test_every_step_has_the_batch_of_a_plain_loop_or_is_refused(division: tuple[int, int, int, int, int]) -> None:
    num_csx, num_workers, micro_batches, rows, samples = division
    passes = [{"x": part.float().unsqueeze(1), "y": part} for part in torch.arange(samples).split(rows)]
    plain = [passes[step % len(passes)]["y"].tolist() for step in range(2 * len(passes))]
    loaders = {(wafer, worker): passes for wafer in range(num_csx) for worker in range(num_workers)}
    steps, is_refused = supplied(loaders, micro_batches, rows, len(plain))
    assert steps == plain[: len(steps)]
    assert is_refused == (samples % rows > 0)
    # A worker looks one batch of its own ahead, and at those of the others on the way.
    assert is_refused or len(steps) == len(plain)


@given(divisions())
def test_parts_that_input_fns_make_are_a_plain_loops_batches_or_are_refused(
    division: tuple[int, int, int, int, int],
) -> None:
    num_csx, num_workers, micro_batches, rows, samples = division
    plain = [list(range(first, min(first + rows, samples))) for first in range(0, samples, rows)]

    def part(number: int, wafer: int) -> dict[str, Any]:
        y = torch.tensor(plain[number]).tensor_split(num_csx)[wafer]
        return {"x": y.float().unsqueeze(1), "y": y}

    loaders = {
        (wafer, worker): [part(number, wafer) for number in range(worker, len(plain), num_workers)]
        for wafer in range(num_csx)
        for worker in range(num_workers)
    }
    with pytest.MonkeyPatch.context() as patch:
        for asked in ("_rank_was_asked", "_share_was_asked"):
            patch.setattr(batches, asked, lambda: True)
        num_steps = len(plain) if len(plain) >= num_workers else 0
        steps, is_refused = supplied(loaders, micro_batches, rows, num_steps)
    assert steps == plain[: len(steps)]
    assert is_refused == (num_steps > 0 and samples % rows > 0)
    assert is_refused or len(steps) == num_steps


def test_tensors_of_a_dict_are_taken_by_key_in_any_order() -> None:
    first = {"x": torch.zeros(4, 1), "y": torch.zeros(4, dtype=torch.int64)}
    alike = [
        {"a": torch.zeros(4, 1), "b": torch.ones(4, 1)},
        {"b": torch.full((4, 1), 3.0), "a": torch.full((4, 1), 2.0)},
    ]
    chosen = selection()
    chosen._members = (chosen._members[0],) * 2
    taken = list(own(chosen, iter(alike)))
    assert [[tensor[0].item() for tensor in tensors] for tensors in taken] == [[0, 1], [2, 3]]
    with pytest.raises(InputFailure, match=r"batch 1 .* it has \['z'\] in the place of \['y'\]"):
        list(own(selection(), iter([first, {"x": first["x"], "z": first["y"]}])))
    with pytest.raises(InputFailure, match=r"batch 1 .* it has \[0\], \[1\] in the place of \['x'\], \['y'\]"):
        list(own(selection(), iter([first, list(first.values())])))


def test_texts_of_a_batch_may_change() -> None:
    several = [{**batch(0), "name": name} for name in ("a", ["b", "c"], None)]
    assert len(list(own(selection(), iter(several)))) == 3


def of_graphs() -> Selection:
    nodes = TensorLayout(dtype="float32", shape=(5, 2), offset=0)
    edges = TensorLayout(dtype="int64", shape=(2, 7), offset=64)
    return Selection(prepare_of(worker=1, num_workers=2), layout_of([nodes, edges], 1, 1), "input_fn (train.py:7)")


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


NUMBERS: dict[str, Callable[[int], object]] = {
    "a float": lambda number: 0.5 + number,
    "an integer": lambda number: number,
    "of NumPy": lambda number: np.float32(number),
    "an array": lambda number: np.arange(ROWS) + number,
    "one more": lambda number: [1] * (number + 1),
    "another type": lambda number: True if number else 1,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_beside_the_tensors_may_not_change(name: str) -> None:
    given = ({**batch(number), "lam": {"value": NUMBERS[name](number)}} for number in range(3))
    with pytest.raises(InputFailure, match=r"(?s)batch 1 of the input_fn input_fn \(train.py:7\) has at .*torch.full"):
        list(own(selection(), given))


@pytest.mark.parametrize("value", [3, float("nan"), np.ones(2), np.float64("nan"), None, "text", np.array(["a"])])
def test_a_number_beside_the_tensors_may_be_the_same(value: Any) -> None:
    assert len(list(own(selection(), ({**batch(number), "lam": value} for number in range(3))))) == 3


class Kept:
    """An object beside the tensors, of which each batch has another or the same."""

    def __init__(self, mask: Any) -> None:
        self.parts = {"mask": mask}


def test_no_object_of_any_batch_may_hide_tensors() -> None:
    """The client has checked the first batch alone."""
    plain = Kept("no tensor")
    found = own(
        selection(), iter([batch(0) | {"name": kept} for kept in (Kept(None), plain, plain, Kept(torch.ones(4)))])
    )
    assert len(list(islice(found, 3))) == 3
    with pytest.raises(InputFailure, match=r"batch 3 .*train.py:7.* an object of Kept, whose tensors"):
        next(found)


def test_an_object_that_all_batches_have_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Any] = []
    monkeypatch.setattr(batches, "hides_tensors", searched.append)
    kept = Kept(list(range(1000)))
    assert len(list(own(selection(), (batch(n) | {"name": kept} for n in range(5))))) == 5
    assert searched == [kept]


def test_names_of_samples_may_change() -> None:
    given = ({**batch(number), "name": [f"{number}.png"], "path": np.array([f"{number}"])} for number in range(3))
    assert len(list(own(selection(), given))) == 3


def test_digests_of_numbered_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_share_was_asked", lambda: True)

    def digests(num_csx: int, **tensors: torch.Tensor) -> list[str]:
        rows = len(next(iter(tensors.values())))
        chosen = selection(num_csx=num_csx, rows=rows * num_csx)
        shapes = [(rows, *tensor.shape[1:]) for tensor in tensors.values()]
        chosen._members = tuple(TensorLayout(dtype="any", shape=shape, offset=0) for shape in shapes)
        monkeypatch.setattr(chosen, "_parts", lambda number, index, tensor, member, first_row: [tensor])
        next(own(chosen, iter([tensors])))
        return chosen.digests

    numbers = torch.arange(4) * 2
    assert len(digests(2, y=numbers)) == 1
    assert digests(2, y=numbers) == digests(2, x=torch.ones(4), y=numbers) != digests(2, y=numbers + 8)
    assert digests(1, y=numbers) == []  # there are no others
    rows = {"mask": torch.ones(4, 3).bool(), "positions": torch.arange(3).expand(4, 3), "x": torch.randn(4, 3)}
    assert digests(2, **rows) == []
    assert len(digests(2, tokens=torch.arange(12).reshape(4, 3), **rows)) == 1
