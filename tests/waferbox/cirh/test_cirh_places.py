"""Results written to memory that has its size for good (a shared segment), as the roles have them written."""

import torch
from cirh_examples import examples

from waferbox.cirh.execution.kernel import Kernel


def fixed(like: torch.Tensor) -> torch.Tensor:
    """A tensor in memory that cannot grow."""
    buffer = bytearray(max(like.nbytes, 1))
    return torch.frombuffer(buffer, dtype=like.dtype, count=like.numel()).reshape(like.shape) if like.numel() else like


def test_every_operation_writes_to_a_place_of_fixed_size() -> None:
    for example in examples():
        kernel = Kernel.build(example.module())
        expected = kernel(example.inputs())
        places = [fixed(result) for result in expected]
        for result, place, value in zip(kernel(example.inputs(), places), places, expected, strict=True):
            assert result is place, example.name
            torch.testing.assert_close(place, value, rtol=0, atol=0, equal_nan=True, msg=example.name)
