"""Digests of batches: whatever differs in a value changes them, and what a batch is made of does not."""

import hypothesis
import pytest
import torch
from hypothesis import strategies

from waferbox.input_process import batch_digest as module
from waferbox.input_process.batch_digest import BATCH_DIGEST_BYTES, batch_digest, is_other_batch

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
    assert len(digest) == BATCH_DIGEST_BYTES
    assert digest == batch_digest([torch.ones(shape, dtype=dtype)])
    assert digest == batch_digest([torch.ones((*shape, 2), dtype=dtype)[..., 0]])  # with gaps in memory


@hypothesis.given(
    position=strategies.integers(0, 11), values=strategies.lists(strategies.floats(width=32), min_size=12, max_size=12)
)
def test_any_other_value_is_another_batch(position: int, values: list[float]) -> None:
    one = torch.tensor(values).reshape(4, 3)
    other = one.clone()
    other.view(torch.int32).view(-1)[position] += 1
    assert is_other_batch(batch_digest([one]), batch_digest([other]))
    assert not is_other_batch(batch_digest([one]), batch_digest([one.clone()]))


def test_batches_of_another_layout_say_nothing() -> None:
    whole, part = batch_digest([torch.ones(4)]), batch_digest([torch.zeros(2)])
    assert not is_other_batch(whole, part)
    assert not is_other_batch(whole, batch_digest([torch.zeros(4, dtype=torch.int32)]))
    assert not is_other_batch(whole, b"")
    assert not is_other_batch(b"", b"")


def test_no_values_are_no_digest() -> None:
    assert batch_digest([]) == b""
    assert batch_digest([torch.ones(2), torch.ones(2, device="meta")]) == b""
    assert batch_digest([torch.eye(2).to_sparse()]) == b""


def test_of_a_large_tensor_the_first_bytes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 8)
    tensor = torch.arange(4.0)
    later, early = tensor.clone(), tensor.clone()
    later[3], early[1] = 7.0, 7.0
    assert batch_digest([tensor]) == batch_digest([later]) != batch_digest([early])
