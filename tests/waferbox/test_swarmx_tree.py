"""The shape of the SwarmX tree."""

import pytest

from waferbox.runtime.swarmx_tree import FAN_IN, swarmx_tree, tree_size


@pytest.mark.parametrize("num_wafers", [*range(1, 40), 64, 65, 100])
def test_every_wafer_has_its_place_once_and_in_order(num_wafers: int) -> None:
    tree = swarmx_tree(num_wafers, 1000)
    assert len(tree) == tree_size(num_wafers)
    assert [place.index for place in tree] == list(range(len(tree)))
    assert tree[0].parent is None

    def below(index: int) -> list[int]:
        place = tree[index]
        assert not (place.wafers and place.children)
        assert 1 <= len(place.wafers or place.children) <= FAN_IN
        for position, child in enumerate(place.children):
            assert (tree[child].parent, tree[child].position) == (index, position)
        return [*place.wafers, *(wafer for child in place.children for wafer in below(child))]

    assert below(0) == list(range(num_wafers))


def test_too_few_nodes_give_one_flat_node() -> None:
    (place,) = swarmx_tree(6, 2)
    assert place.wafers == tuple(range(6))


def test_few_wafers_need_one_node() -> None:
    assert [tree_size(n) for n in (1, 4, 5, 16, 17)] == [1, 1, 3, 5, 8]
