"""Training of every model in float32: one wafer and two give what plain torch gives."""

import pytest
from model_training import TRAINED, assert_equal, plain, simulated

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("wafers", [1, 2])
@pytest.mark.parametrize("name", TRAINED)
def test_training_gives_what_plain_torch_gives(name: str, wafers: int) -> None:
    assert_equal(simulated(name, None, wafers, seed=0), plain(name, None, seed=0), losses=1e-5, states=1e-4)
