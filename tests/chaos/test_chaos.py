"""The short form of `make chaos`: deaths at moments that have been hard, one cluster, results to the bit."""

from collections.abc import Iterator, Sequence

import pytest
from chaos_trial import SIZES, Laboratory, laboratory, with_executions
from injected_faults import Fault

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

TWO = SIZES[1]  # wafers and shards


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    folder = tmp_path_factory.mktemp("chaos")
    with laboratory(folder / "laboratory", folder / "cache", steps=60) as made:
        yield made


def test_many_recoveries_leave_nothing_with_those_who_survive(chaos: Laboratory) -> None:
    """Of a script's whole life: its job's coordinator and its nodes go with it."""
    victims = ("wafer-0", "worker-0", "wafer-1", "worker-1")  # one lives 5 s at least: else it is not started again
    for number in range(2):
        faults = [Fault(victim=victim, moment="step", at=8 + 12 * n) for n, victim in enumerate(victims)]
        outcome = chaos.run(TWO, faults)
        assert outcome.good, outcome.errors or outcome.left
        if not number:
            before = chaos.figures()
    after = chaos.figures()
    survivors = {process: before[process] for process in before.keys() & after.keys()}
    assert {"memoryx", "swarmx"} <= {name for name, *_ in survivors.values()}
    for process, (name, resident, descriptors) in survivors.items():
        _, resident_after, descriptors_after = after[process]
        assert descriptors_after <= descriptors, name
        assert resident_after < 1.05 * resident, name


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(victim="memoryx-1", moment="write point")],
        [Fault(victim="wafer-0", moment="step", at=40), Fault(victim="memoryx-0", moment="put back")],
        [
            Fault(victim="memoryx-0", moment="open point", action="full", at=2),
            Fault(victim="worker-1", moment="step", at=45),
        ],
        [Fault(victim="wafer-0", moment="step", at=40), Fault(victim="memoryx-0", moment="stop again")],
        [Fault(victim="swarmx-0", moment="load"), Fault(victim="wafer-1", moment="start again")],
        [Fault(victim="wafer-1", moment="step", at=40, action="hang")],
        [Fault(victim="memoryx-0", moment="step", at=40, action="memory")],
        [Fault(victim="wafer-0", moment="step", at=40, action="lose")],
        [Fault(victim="coordinator", moment="record", at=1)],
        [
            Fault(victim="coordinator", moment="random", at=0.2),
            Fault(victim="fork server", moment="random", at=0.24),
        ],
    ],
    ids=lambda faults: " and ".join(map(str, faults)),
)
def test_results_are_those_of_the_undisturbed_run(chaos: Laboratory, faults: Sequence[Fault]) -> None:
    outcome = chaos.run(TWO, faults)
    assert outcome.survived, outcome.errors
    assert outcome.identical
    assert not outcome.left
    assert outcome.injected == len(faults)


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(victim="worker-1", moment="stop again", epoch=4)],
        [
            Fault(victim="memoryx-1", moment="step again", at=6, epoch=2),
            Fault(victim="coordinator", moment="line", at=40),
        ],
    ],
    ids=lambda faults: " and ".join(map(str, faults)),
)
def test_later_executions_have_the_states_that_they_begin_with(chaos: Laboratory, faults: Sequence[Fault]) -> None:
    """Training, evaluation and states that the script changes, one after the other in one job."""
    outcome = chaos.run(with_executions(TWO), faults)
    assert outcome.survived, outcome.errors
    assert outcome.identical, outcome.errors
    assert not outcome.left
    assert outcome.injected == len(faults)
