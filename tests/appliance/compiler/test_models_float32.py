"""Training of every model in float32: one wafer and two give what plain torch gives."""

import itertools

import pytest
from model_training import IN_MICRO_BATCHES, TRAINED, assert_equal, plain, simulated

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("wafers", [1, 2])
@pytest.mark.parametrize("name", TRAINED)
def test_training_gives_what_plain_torch_gives(name: str, wafers: int) -> None:
    assert_equal(simulated(name, None, wafers, seed=0), plain(name, None, seed=0), losses=1e-5, states=1e-4)


# (wafers, micro-batches, rounds): each model has both values of each, and the models together all combinations.
COVERING = [
    ((1, 2, True), (2, 4, False)),
    ((1, 4, True), (2, 2, False)),
    ((1, 2, False), (2, 4, True)),
    ((1, 4, False), (2, 2, True)),
]


@pytest.mark.parametrize(
    ("name", "wafers", "micro_batches", "rounds"),
    [
        (name, *combination)
        for name, combinations in zip(IN_MICRO_BATCHES, itertools.cycle(COVERING), strict=False)
        for combination in combinations
    ],
)
def test_training_in_micro_batches_gives_what_plain_torch_gives(
    name: str, wafers: int, micro_batches: int, rounds: bool
) -> None:
    """Batch norm, counts of labels and scores of all samples with all are of the whole batch."""
    ours = simulated(name, None, wafers, 0, rounds, micro_batches=micro_batches)
    assert_equal(ours, plain(name, None, seed=0), losses=1e-5, states=1e-4)
