"""The rule that places states on shards."""

from hypothesis import given
from hypothesis import strategies as st

from waferbox.placement import place_on_shards


def test_the_largest_are_placed_first() -> None:
    assert place_on_shards({"a": 1, "b": 5, "c": 3, "d": 2}, 2) == {"b": 0, "c": 1, "d": 1, "a": 0}


def test_what_is_pinned_stays_and_counts() -> None:
    assert place_on_shards({"a": 4, "b": 3, "c": 2}, 2, {"a": 1}) == {"a": 1, "b": 0, "c": 0}


@given(st.dictionaries(st.integers(), st.integers(1, 1000)), st.integers(1, 5))
def test_no_shard_has_more_than_another_by_more_than_its_last(sizes: dict[int, int], num_shards: int) -> None:
    placed = place_on_shards(sizes, num_shards)
    assert placed.keys() == sizes.keys()
    loads = [sum(sizes[key] for key, shard in placed.items() if shard == each) for each in range(num_shards)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
