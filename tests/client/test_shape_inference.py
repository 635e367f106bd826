"""Results of operations on meta tensors are those of torch, also where they are remembered."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cstorch._internal.tracing import shape_inference
from cstorch._internal.tracing.shape_inference import run_on_meta

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    shape_inference._remembered.clear()
    yield
    shape_inference._remembered.clear()


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(out: object) -> object:
    if isinstance(out, torch.Tensor):
        return out.shape, out.stride(), out.dtype, out.device, out.storage_offset()
    return [described(item) for item in out] if isinstance(out, (list, tuple)) else out


tensors = st.builds(
    lambda shape, dtype, turned: (
        meta(*shape, dtype=dtype).transpose(0, -1) if turned and shape else meta(*shape, dtype=dtype)
    ),
    st.lists(st.sampled_from([1, 3]), max_size=3),
    st.sampled_from(DTYPES),
    st.booleans(),
)


@given(st.lists(st.tuples(tensors, st.one_of(tensors, st.sampled_from([2, 2.0, True]))), min_size=1, max_size=6))
def test_results_are_those_of_torch(pairs: list[tuple[torch.Tensor, torch.Tensor | float]]) -> None:
    for first, second in [*pairs, *pairs]:
        for func in (aten.mul, aten.div, aten.eq):
            overload = func.Tensor if isinstance(second, torch.Tensor) or func is not aten.eq else func.Scalar
            assert described(run_on_meta(overload, (first, second), {})) == described(overload(first, second))


def test_an_operation_runs_once_for_equal_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = meta(2, 3), meta(2, 3)
    run_on_meta(aten.native_layer_norm.default, (one, [3], None, None, 1e-5), {})
    results = run_on_meta(aten.native_layer_norm.default, (other, [3], None, None, 1e-5), {})
    assert len(shape_inference._remembered) == 1
    assert described(results) == described(aten.native_layer_norm.default(other, [3], None, None, 1e-5))
    assert len({result.untyped_storage()._cdata for result in (*results, one, other)}) == 5


def test_the_default_type_counts() -> None:
    whole = meta(2, dtype=torch.int64)
    assert run_on_meta(aten.true_divide.Tensor, (whole, whole), {}).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert run_on_meta(aten.true_divide.Tensor, (whole, whole), {}).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_views_and_writes_are_not_remembered() -> None:
    tensor = meta(2, 3)
    for _ in range(2):
        view = run_on_meta(aten.view.default, (tensor, [6]), {})
        assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        assert run_on_meta(aten.add_.Tensor, (tensor, 1), {}) is tensor
    assert not shape_inference._remembered


def test_a_result_that_is_an_argument_is_not_remembered() -> None:
    def dropped(tensor: torch.Tensor) -> torch.Tensor:
        result, _ = run_on_meta(aten.native_dropout.default, (tensor, 0.5, False), {})
        assert isinstance(result, torch.Tensor)
        return result

    expected = aten.native_dropout.default(meta(2), 0.5, False)[0]
    assert described(dropped(meta(2))) == described(dropped(meta(2))) == described(expected)


def test_errors_are_those_of_torch_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broadcast"):
            run_on_meta(aten.mul.Tensor, (meta(2), meta(3)), {})


def test_many_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_inference, "_MOST_REMEMBERED", 4)
    for size in range(1, 10):
        run_on_meta(aten.neg.default, (meta(size),), {})
        assert len(shape_inference._remembered) <= 4
