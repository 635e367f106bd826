"""Numbers that are skipped, against numbers that are drawn."""

import pytest
import torch

from cstorch._internal.tracing import generator

COUNTS = [16, 17, 31, 32, 600, 623, 624, 625, 1248, 9_984, 16_391, 700_000, 1_400_003]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["uniform_", "normal_"])
def test_a_skip_ends_where_the_numbers_end(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    count_draws = generator.uniform_draws if name == "uniform_" else generator.normal_draws
    known = 0
    for count in COUNTS:
        before = torch.get_rng_state()
        getattr(torch.empty(count, dtype=dtype), name)()
        draws = count_draws(count, dtype)
        if draws is not None:
            known += 1
            assert torch.equal(generator.skip(before, draws), torch.get_rng_state()), count
    assert known >= 5


def test_what_is_not_known_is_not_skipped() -> None:
    assert generator.normal_draws(15, torch.float32) is None  # made one by one, with a number kept for the next
    assert generator.normal_draws(17, torch.bfloat16) is None
    assert generator.normal_draws(32, torch.float64) is None
    assert generator.uniform_draws(32, torch.float64) is None


def test_a_kept_number_is_kept() -> None:
    torch.manual_seed(11)
    torch.empty(3).normal_()  # keeps one
    before = torch.get_rng_state()
    torch.empty(1000).normal_()
    draws = generator.normal_draws(1000, torch.float32)
    assert draws is not None
    assert torch.equal(generator.skip(before, draws), torch.get_rng_state())
    torch.set_rng_state(generator.skip(before, 0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("blocks", [1000, 1001, 1002, 5000])
def test_a_jump_ends_where_a_walk_ends(blocks: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    torch.empty(624 * blocks).uniform_()
    assert torch.equal(generator.skip(before, 624 * blocks), torch.get_rng_state())
