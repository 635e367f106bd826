"""Seeds of the simulated cluster: what it must keep to, whatever fails, and in whatever order."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from simulated_cluster import (
    MOST_FAULTS,
    RECOVERY_SECONDS,
    Fault,
    SimulatedCluster,
    draw_schedule,
    failure_of,
    shortest_failure,
)

from appliance.coordinator.execution.execution import CoordinatedExecution
from appliance.coordinator.execution.failures import StandstillWatch
from appliance.coordinator.nodes.inputs import Inputs
from appliance.coordinator.nodes.job_nodes import JobMembers
from appliance.coordinator.nodes.topology import Member
from appliance.coordinator.recovery.fewer_wafers import FewerWafers
from appliance.coordinator.recovery.recovery import Recovery
from appliance.management import supervision
from appliance.management.coordination import Coordination
from appliance.management.jobs import JobEntry
from appliance.management.nodes.job_queue import Admission
from appliance.management.nodes.registry import NodeRegistry
from appliance.management.nodes.replacements import Replacements
from appliance.management.service import ManagementService
from appliance.management.supervision import Disconnected, Exited, Supervision
from waferbox import settings
from wsc.v1 import management_pb2, node_pb2

pytestmark = pytest.mark.timeout(600)  # a machine that is shared may have a tenth of its time for this

SEEDS = 500
CHUNK = 25
MUTATION_SEEDS = 1000


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is logged: most faults are, and there are thousands. Recovery points are frequent."""
    monkeypatch.setenv(settings.RECOVERY_SECONDS.name, RECOVERY_SECONDS)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_jobs_end_as_they_should(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + CHUNK):
        failure = shortest_failure(seed, tmp_path)
        assert not failure, failure


def test_a_seed_gives_the_same_run_event_by_event(tmp_path: Path) -> None:
    for seed in range(5):
        journals = []
        for _ in range(2):
            cluster = SimulatedCluster(seed, draw_schedule(seed, MOST_FAULTS), tmp_path)
            cluster.run()
            journals.append((cluster.world.now, cluster.world.journal))
            cluster.world.close()
        assert journals[0] == journals[1]


# --- Mutations: faults of the product that the simulation must find ---------------------------------------------------


def _keep_nodes(self: NodeRegistry, job: str) -> None:
    """An ended job keeps its nodes."""
    self._forget(job)
    self._admit()


def _believe_old_streams(self: Supervision, event: Disconnected) -> None:
    """The end of a former stream counts as that of the present one."""
    self._drop_stream()
    self._follow_signs()


def _see_nothing(self: StandstillWatch, running: Sequence[str], *, is_client_behind: bool) -> str:
    """Nobody looks for nodes that wait for each other."""
    return ""


def _end_without_asking(self: Supervision, event: Exited) -> None:
    """A coordinator that ends gets no successor."""
    self._process = None
    self._how = event.how
    self._end_without_successor()


def _drop_reports(self: Coordination, report: management_pb2.JobReport) -> None:
    """The last report of a job is not kept."""


def _complete_early(self: CoordinatedExecution, step: int) -> bool:
    """A recovery point counts although the client has not received the outputs before it."""
    return True


def _prepare_nobody(self: Inputs, workers: Iterable[Member]) -> None:
    """Replacements of workers get no inputs."""


def _admit_nobody_again(self: NodeRegistry) -> None:
    """A job that requests the nodes that it has gets no answer."""


def _drop_acknowledgements(self: CoordinatedExecution, step: int) -> None:
    """The coordinator does not note which outputs the client has consumed."""


def _forget_spares(self: Replacements, infos: Sequence[management_pb2.NodeInfo], now: float) -> Sequence[Admission]:
    """Free nodes do not replace dead ones."""
    return ()


def _bind_nothing(self: JobMembers) -> Sequence[str]:
    """A preempted job gets nodes on any hosts."""
    return ()


def _bind_nobody(self: Recovery) -> Sequence[str]:
    """Nodes on other hosts take the place of those whose host alone has their states."""
    return ()


def _restore_without_inputs(self: Recovery) -> None:
    """The workers of a job that was preempted get no inputs."""
    self.is_incomplete = True


def _tell_nobody(self: ManagementService, job: JobEntry) -> None:
    """The nodes do not learn that a job has ended."""


def _fail_early(self: CoordinatedExecution, step: int) -> node_pb2.Failure | None:
    """A step without input ends the execution although the client has not received the results before it."""
    return None if self._epoch is None else self._epoch.input_failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A method that is replaced by a wrong one.

    Attributes:
        owner: the class of the method.
        method: its name.
        replacement: the wrong method.
        kinds: the kinds of faults that make it go wrong; empty: all kinds.
        seed: one that found it when this was written, which is tried first.
    """

    owner: type
    method: str
    replacement: Callable[..., object]
    kinds: Sequence[str] = ()
    seed: int = 0


MUTATIONS: dict[str, Mutation] = {
    "an ended job keeps its nodes": Mutation(owner=NodeRegistry, method="release", replacement=_keep_nodes),
    "reports are not kept": Mutation(owner=Coordination, method="report", replacement=_drop_reports),
    "returning jobs get no answer": Mutation(
        owner=NodeRegistry, method="_admit_returned", replacement=_admit_nobody_again, seed=3
    ),
    "points are complete too early": Mutation(
        owner=CoordinatedExecution,
        method="_is_received",
        replacement=_complete_early,
        kinds=("kill a coordinator", "stall a client"),
        seed=84,
    ),
    "acknowledgements are dropped": Mutation(
        owner=CoordinatedExecution, method="consumed", replacement=_drop_acknowledgements
    ),
    "spares are forgotten": Mutation(
        owner=Replacements, method="admit", replacement=_forget_spares, kinds=("kill a node",), seed=14
    ),
    "replacements get no inputs": Mutation(owner=Inputs, method="prepare_again", replacement=_prepare_nobody, seed=9),
    "preempted jobs get nodes anywhere": Mutation(
        owner=JobMembers, method="_bound", replacement=_bind_nothing, kinds=("stall a coordinator",), seed=84
    ),
    "lost states are looked for elsewhere": Mutation(
        owner=Recovery, method="_bound", replacement=_bind_nobody, kinds=("lose a host",), seed=196
    ),
    "preempted jobs get no inputs": Mutation(
        owner=Recovery, method="preempted", replacement=_restore_without_inputs, seed=24
    ),
    "steps without input discard the ones before": Mutation(
        owner=CoordinatedExecution, method="_input_failure", replacement=_fail_early, seed=3
    ),
    "nodes may wait for each other for ever": Mutation(
        owner=StandstillWatch, method="tick", replacement=_see_nothing, kinds=("lose a frame",), seed=5
    ),
    "points of ended jobs stay": Mutation(
        owner=ManagementService, method="_job_ended", replacement=_tell_nobody, seed=36
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionMutation:
    """A transition of all states of a supervision that is replaced by a wrong one.

    Attributes:
        event: that of the transition.
        replacement: the wrong transition.
        kind: the kind of faults that make it go wrong.
        seed: as of a Mutation.
    """

    event: type
    replacement: Callable[..., object]
    kind: str
    seed: int = 0


TRANSITION_MUTATIONS: dict[str, TransitionMutation] = {
    "the end of a former stream counts": TransitionMutation(
        event=Disconnected, replacement=_believe_old_streams, kind="break a connection", seed=160
    ),
    "a coordinator gets no successor": TransitionMutation(
        event=Exited, replacement=_end_without_asking, kind="kill a coordinator"
    ),
}


def _finds(tmp_path: Path, kinds: Sequence[str], first: int) -> bool:
    seeds = [first, *range(MUTATION_SEEDS)]
    return any(failure_of(seed, draw_schedule(seed, MOST_FAULTS, kinds), tmp_path) for seed in seeds)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name]
    monkeypatch.setattr(mutation.owner, mutation.method, mutation.replacement)
    assert _finds(tmp_path, mutation.kinds, mutation.seed)


@pytest.mark.parametrize("name", TRANSITION_MUTATIONS)
def test_a_fault_of_a_transition_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = TRANSITION_MUTATIONS[name]
    for transitions in supervision.TRANSITIONS.values():
        if mutation.event in transitions:
            monkeypatch.setitem(transitions, mutation.event, mutation.replacement)
    assert _finds(tmp_path, [mutation.kind], mutation.seed)


# --- Seeds that found faults ------------------------------------------------------------------------------------------


def test_the_last_report_of_a_coordinator_that_was_stopped_for_a_while_counts(tmp_path: Path) -> None:
    """Its stream had broken, so that the report came with the next hello, and management did not read it there."""
    for seed in range(20):
        schedule = [Fault(at, "stall a coordinator", seed) for at in (7.0, 13.0, 20.0)]
        failure = failure_of(seed, schedule, tmp_path)
        assert not failure, failure


@pytest.mark.parametrize(
    ("seed", "schedule"),
    [
        # Management did not ask the ingress again, so that a coordinator that was stopped then seemed to have gone.
        pytest.param(
            352,
            [
                Fault(22.125904862979723, "stall a coordinator", 4242992428),
                Fault(27.617685832610796, "break a connection", 2108542765),
                Fault(29.938470532660823, "break a connection", 3037141846),
            ],
            id="a process whose connection broke is known again if its job gets no successor",
        ),
        # Management had been started again meanwhile; two nodes were one member of the job.
        pytest.param(
            5005440,
            [
                Fault(16.243252446726434, "stall a coordinator", 3498984931),
                Fault(19.20728736860887, "lose a host", 1443352199),
                Fault(22.161035480087268, "stall a node", 2492263308),
            ],
            id="a node that registers late is not kept for a job that was preempted and has others",
        ),
        pytest.param(
            9299350,
            [
                Fault(2.847744919245856, "stall a coordinator", 120929604),
                Fault(10.753849567980778, "stall a client", 383673996),
                Fault(23.641730146843468, "stall management", 1981912414),
            ],
            id="the cause of a job's end reaches a script although management was stopped for twenty seconds",
        ),
        pytest.param(
            60004383,
            [Fault(19.906144373214193, "lose a frame", 3790598762)],
            id="nodes that wait for each other owe nothing to a client that left its loop",
        ),
        # A recovery was over before the next second, and the first reports of the new epoch came after that.
        pytest.param(
            60100186,
            [
                Fault(9.029422024210149, "lose a frame", 1109776339),
                Fault(9.48866913241394, "kill a coordinator", 2805906914),
                Fault(17.036314635060595, "stall a client", 2554064551),
                Fault(18.63022551475694, "stall a client", 3448746127),
                Fault(23.24371689635068, "stall a client", 2389759474),
                Fault(37.49071236000426, "lose a frame", 2437104337),
            ],
            id="nodes that waited for each other are not taken for waiting in the next epoch",
        ),
    ],
)
def test_a_seed_that_found_a_fault(seed: int, schedule: Sequence[Fault], tmp_path: Path) -> None:
    failure = failure_of(seed, schedule, tmp_path)
    assert not failure, failure


def test_jobs_continue_with_fewer_wafers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[str] = []
    shrink = FewerWafers.shrink_to_survivors

    async def shrink_and_note(fewer_wafers: FewerWafers, dead: Collection[str]) -> str:
        results.append(await shrink(fewer_wafers, dead))
        return results[-1]

    monkeypatch.setattr(FewerWafers, "shrink_to_survivors", shrink_and_note)
    for seed in range(50):
        failure = failure_of(seed, draw_schedule(seed, MOST_FAULTS, ["lose a node"]), tmp_path)
        assert not failure, failure
    assert any(results)
