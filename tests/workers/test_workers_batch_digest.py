"""Digests of batches: whatever differs in a value changes them, and what a batch is made of does not."""

import hypothesis
import pytest
import torch
from hypothesis import strategies

from waferbox.input_process import batch_digest as module
from waferbox.input_process.batch_digest import BATCH_DIGEST_BYTES, UNKNOWN, batch_digest

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (4, 3)])
def test_equal_batches_have_equal_digests(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    digest = batch_digest([torch.ones(shape, dtype=dtype)])
    assert len(digest.layout) == len(digest.values) == BATCH_DIGEST_BYTES
    assert digest == batch_digest([torch.ones(shape, dtype=dtype)])
    assert digest == batch_digest([torch.ones((*shape, 2), dtype=dtype)[..., 0]])  # with gaps in memory


@hypothesis.given(
    position=strategies.integers(0, 11), values=strategies.lists(strategies.floats(width=32), min_size=12, max_size=12)
)
def test_any_other_value_is_another_batch(position: int, values: list[float]) -> None:
    one = torch.tensor(values).reshape(4, 3)
    other = one.clone()
    other.view(torch.int32).view(-1)[position] += 1
    assert batch_digest([one]).layout == batch_digest([other]).layout
    assert batch_digest([one]).values != batch_digest([other]).values
    assert batch_digest([one]) == batch_digest([one.clone()])


def test_a_layout_is_of_types_and_shapes() -> None:
    layouts = {batch_digest(batch).layout for batch in ([torch.ones(4)], [torch.zeros(4)])}
    assert len(layouts) == 1
    others = ([torch.ones(2)], [torch.ones(4, 1)], [torch.ones(4).int()], [torch.ones(4), torch.ones(4)])
    assert len(layouts | {batch_digest(batch).layout for batch in others}) == 5


def test_no_values_are_no_digest() -> None:
    assert batch_digest([]) == UNKNOWN
    assert batch_digest([torch.ones(2), torch.ones(2, device="meta")]) == UNKNOWN
    assert batch_digest([torch.eye(2).to_sparse()]) == UNKNOWN


def test_of_a_large_tensor_the_first_bytes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 8)
    tensor = torch.arange(4.0)
    later, early = tensor.clone(), tensor.clone()
    later[3], early[1] = 7.0, 7.0
    assert batch_digest([tensor]) == batch_digest([later]) != batch_digest([early])
