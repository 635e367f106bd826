"""Large float32 products, by oneDNN, are what torch's own are, however their operands lie in memory."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from cirh_examples import Example

from waferbox.cirh import CirhError
from waferbox.cirh.calls import products
from waferbox.cirh.calls.products import is_large_product, onednn_is_faster
from waferbox.cirh.dialect.attributes import AttrValue
from waferbox.cirh.dialect.spec import Site
from waferbox.cirh.dialect.types import TensorInfo
from waferbox.cirh.execution.kernel import Kernel

ROWS, INNER, COLUMNS = 64, 300, 140
F32 = torch.float32
has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch has no types of it
needs_onednn = pytest.mark.skipif(not has_onednn, reason="this torch has no oneDNN")


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On every processor. How often it was called."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    calls: list[int] = []
    call = products._by_onednn

    def counted(*operands: Any) -> Any:
        calls.append(1)
        return call(*operands)

    monkeypatch.setattr(products, "_by_onednn", counted)
    return calls


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def laid_out(tensor: torch.Tensor, way: str) -> torch.Tensor:
    """The same matrix, otherwise in memory."""
    match way:
        case "columns first":
            return tensor.t().contiguous().t()
        case "every second column":
            wide = torch.zeros(tensor.shape[0], 2 * tensor.shape[1])
            wide[:, ::2] = tensor
            return wide[:, ::2]
        case "rows of a wider one":
            wide = torch.zeros(tensor.shape[0], tensor.shape[1] + 3)
            wide[:, 1:-2] = tensor
            return wide[:, 1:-2]
        case "one row for all":
            return tensor[:1].expand(tensor.shape)
    return tensor


WAYS = ["plain", "columns first", "every second column", "rows of a wider one", "one row for all"]


def check(name: str, operands: list[torch.Tensor], attributes: Mapping[str, AttrValue], expected: torch.Tensor) -> None:
    kernel = Kernel.build(Example(name, operands, attributes).module())
    place = torch.full_like(expected, torch.nan)
    (result,), (placed,) = kernel(operands), kernel(operands, [place])
    torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(result, placed)
    assert placed.data_ptr() == place.data_ptr()
    assert result.is_contiguous()


@needs_onednn
@pytest.mark.parametrize(("left", "right"), list(product(WAYS, WAYS)))
@pytest.mark.parametrize("transposes", list(product((False, True), repeat=2)), ids=str)
def test_products(by_onednn: list[int], left: str, right: str, transposes: tuple[bool, bool]) -> None:
    a = laid_out(matrix(*((INNER, ROWS) if transposes[0] else (ROWS, INNER))), left)
    b = laid_out(matrix(*((COLUMNS, INNER) if transposes[1] else (INNER, COLUMNS))), right)
    exact = (a.t() if transposes[0] else a).double() @ (b.t() if transposes[1] else b).double()
    attributes: dict[str, AttrValue] = {"transpose_a": transposes[0], "transpose_b": transposes[1]}
    check("cirh.MatMul", [a, b], attributes, exact.float())
    assert len(by_onednn) == 2


@needs_onednn
@pytest.mark.parametrize("right", WAYS)
def test_products_with_a_bias(by_onednn: list[int], right: str) -> None:
    a, b, bias = matrix(ROWS, INNER), laid_out(matrix(INNER, COLUMNS), right), matrix(COLUMNS)
    check("aten.addmm", [bias, a, b], {}, (bias.double() + a.double() @ b.double()).float())
    check("aten.mm", [a, b], {}, (a.double() @ b.double()).float())
    assert len(by_onednn) == 4


@needs_onednn
@pytest.mark.parametrize(
    ("bias", "attributes"), [((1, COLUMNS), {}), ((COLUMNS,), {"alpha": 2}), ((COLUMNS,), {"beta": 0.5})]
)
def test_other_sums_are_torchs_own(by_onednn: list[int], bias: tuple[int, ...], attributes: dict[str, float]) -> None:
    added, left, right = matrix(*bias), matrix(ROWS, INNER), matrix(INNER, COLUMNS)
    expected = torch.addmm(added, left, right, beta=attributes.get("beta", 1), alpha=attributes.get("alpha", 1))
    check("aten.addmm", [added, left, right], attributes, expected)
    assert not by_onednn


@needs_onednn
def test_what_is_not_a_number_stays_so(by_onednn: list[int]) -> None:
    a, b = matrix(ROWS, INNER), matrix(INNER, COLUMNS)
    a[3, 5], a[7, 1], b[0, 9] = torch.nan, torch.inf, -torch.inf
    kernel = Kernel.build(Example("cirh.MatMul", [a, b], {}).module())
    torch.testing.assert_close(kernel([a, b])[0], a @ b, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert by_onednn


@needs_onednn
def test_the_same_product_has_the_same_bits(by_onednn: list[int]) -> None:
    a, b = matrix(ROWS, INNER), matrix(INNER, COLUMNS)
    kernel = Kernel.build(Example("cirh.MatMul", [a, b], {}).module())
    first = kernel([a, b])[0]
    for shift in range(1, 16):  # wherever its operands lie
        moved = [torch.cat([torch.zeros(shift), x.reshape(-1)])[shift:].view(x.shape) for x in (a, b)]
        assert torch.equal(kernel(moved)[0], first)


def test_operands_that_do_not_fit_are_refused(by_onednn: list[int]) -> None:
    with pytest.raises(CirhError, match=r"cirh\.MatMul"):
        Example("cirh.MatMul", [matrix(ROWS, INNER), matrix(INNER + 1, COLUMNS)], {}).module()


@pytest.mark.parametrize(
    ("shapes", "dtype", "large"),
    [
        (((64, 784), (784, 256)), F32, True),
        (((64, 784), (784, 256)), torch.bfloat16, False),
        (((64, 784), (784, 256)), torch.float64, False),
        (((64, 256), (256, 10)), F32, False),
        (((1, 4096), (4096, 4096)), F32, False),
        (((32, 32), (32, 32)), F32, False),
        (((0, 784), (784, 256)), F32, False),
    ],
)
def test_which_are_large(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, large: bool) -> None:
    assert is_large_product(Site("cirh.MatMul", tuple(TensorInfo(shape, dtype) for shape in shapes))) is large


def test_the_processor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    onednn_is_faster.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not onednn_is_faster()
    onednn_is_faster.cache_clear()
