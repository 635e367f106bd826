"""Training in layer pipelined mode: regions of any number and speed, with any micro-batches, give what torch gives."""

import pytest
from model_training import assert_equal, plain, simulated

from appliance.compiler.core.target import ExecutionStrategy, Half, Precision

pytestmark = pytest.mark.parity

NAMES = ("mlp", "cnn", "gpt2", "bert", "t5", "dlrm")


# Not every model with every number of micro-batches on both numbers of cores, but every two of the three together.
@pytest.mark.parametrize(("place", "micro_batches"), [*enumerate([1, 2, 4, 12])])
@pytest.mark.parametrize(("number", "name"), [*enumerate(NAMES)])
def test_training_gives_what_plain_torch_gives(number: int, name: str, place: int, micro_batches: int) -> None:
    cores, seed = (1, 0) if micro_batches == 1 else ((2, 1), (5, 2))[(number + place) % 2]
    ours = simulated(
        name,
        None,
        1,
        seed,
        micro_batches=micro_batches,
        wafer_cores=cores,
        execution_strategy=ExecutionStrategy.PIPELINE,
    )
    assert_equal(ours, plain(name, None, seed), losses=1e-5, states=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_eight_micro_batches_give_what_plain_torch_gives(name: str) -> None:
    name = f"{name} of 24 rows"
    ours = simulated(name, None, 1, 1, micro_batches=8, wafer_cores=3, execution_strategy=ExecutionStrategy.PIPELINE)
    assert_equal(ours, plain(name, None, 1), losses=1e-5, states=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_that_of_weight_streaming(name: str) -> None:
    precision = Precision(half=Half.BFLOAT16)
    streamed = simulated(name, precision, 1, 0, micro_batches=4)
    ours = simulated(
        name, precision, 1, 0, micro_batches=4, wafer_cores=3, execution_strategy=ExecutionStrategy.PIPELINE
    )
    assert_equal(ours, streamed, losses=1e-6, states=1e-6)


# Here, too, every two of model, replicas and micro-batches (with the cores and the seed) together.
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(("number", "name"), [*enumerate(NAMES)])
def test_replicas_give_what_plain_torch_gives(number: int, name: str, replicas: int) -> None:
    micro_batches, cores, seed = ((1, 2, 0), (2, 6, 3))[(number + replicas) % 2]
    ours = simulated(
        name,
        None,
        1,
        seed,
        num_replicas=replicas,
        micro_batches=micro_batches,
        wafer_cores=cores,
        execution_strategy=ExecutionStrategy.PIPELINE,
    )
    assert_equal(ours, plain(name, None, seed), losses=1e-5, states=1e-4)
