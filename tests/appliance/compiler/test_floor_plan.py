"""The wafer's regions: they cover it, do not overlap, are as large as they should be, and lie in order."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.drawing.floor_plan import Region, plan_floor

WORK = st.lists(st.floats(min_value=1e-6, max_value=1.0), min_size=1, max_size=40)


def named(amounts: list[float]) -> list[tuple[str, float]]:
    return [(f"h.{number}", amount) for number, amount in enumerate(amounts)]


def touch(one: Region, other: Region) -> bool:
    """Whether two regions share a piece of a side."""
    across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
    along = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
    return (across == 0 and along > 0) or (along == 0 and across > 0)


@settings(max_examples=60)
@given(WORK, st.integers(40, 130), st.integers(40, 130))
def test_regions_tile_the_wafer_in_the_order_of_the_network(amounts: list[float], width: int, height: int) -> None:
    regions = plan_floor(named(amounts), width, height)
    assert [region.layer for region in regions] == [layer for layer, _ in named(amounts)]
    covered = bytearray(width * height)
    for region in regions:
        assert region.width > 0
        assert region.height > 0
        for y in range(region.y, region.y + region.height):
            begin = y * width + region.x
            assert not any(covered[begin : begin + region.width])
            covered[begin : begin + region.width] = b"\1" * region.width
    assert all(covered)
    assert all(touch(one, other) for one, other in pairwise(regions))
    assert regions == plan_floor(named(amounts), width, height)


@settings(max_examples=60)
@given(st.lists(st.floats(min_value=0.05, max_value=1.0), min_size=1, max_size=40))
def test_areas_are_in_proportion_up_to_a_core_on_each_side(amounts: list[float]) -> None:
    regions = plan_floor(named(amounts), 900, 800)
    for region, amount in zip(regions, amounts, strict=True):
        exact = 900 * 800 * amount / sum(amounts)
        assert abs(region.area - exact) <= region.width + region.height + 1


def test_regions_of_equal_layers_are_nearly_square() -> None:
    for count in (4, 9, 12, 30, 48):
        regions = plan_floor(named([1.0] * count))
        assert max(max(r.width / r.height, r.height / r.width) for r in regions) < 2.1
    # A layer of nothing beside large ones does not spoil their shapes.
    regions = plan_floor(named([1.0] * 12 + [1e-5, 5.0]))
    assert max(max(r.width / r.height, r.height / r.width) for r in regions if r.area > 1000) < 3.5


def test_a_thousand_layers_would_not_fit_and_nothing_is_nothing() -> None:
    assert len(plan_floor(named([1.0] * 922))) == 922
    with pytest.raises(ValueError, match="do not fit"):
        plan_floor(named([1.0] * 923))
    with pytest.raises(ValueError, match="some work"):
        plan_floor([("h", 0.0)])
    assert plan_floor([]) == ()
