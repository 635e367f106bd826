"""Recovery points over several executions: each has all states of its moment, whatever has happened before."""

import queue
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from recovery_cases import recovery_points_of

from waferbox.runtime.progress import Progress
from waferbox.states.layout import StateRequirements
from waferbox.states.point_shares import PointShares
from waferbox.states.store import StateStore
from wsc.v1 import node_pb2, plan_pb2

NAMES = ("weight", "momentum", "metric", "counter")
ELEMENTS = 64
SECONDS = 30.0

some = strategies.sets(strategies.sampled_from(NAMES))


def required_of(names: set[str]) -> StateRequirements:
    type_ = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_INT32, shape=[ELEMENTS])
    return StateRequirements(
        slots=[plan_pb2.StateSlot(value=n, name=name, type=type_) for n, name in enumerate(sorted(names), 1)]
    )


class Keeper:
    """A process that keeps states."""

    def __init__(self, folder: Path) -> None:
        self.store = StateStore()
        self.kept: queue.Queue[node_pb2.RecoveryPointKept] = queue.Queue()
        self.points: PointShares = recovery_points_of(self.store, folder, self.kept.put)

    def values(self) -> Mapping[str, int]:
        """Of the states that somebody has written."""
        written = filter(self.store.is_written, self.store.extents())
        values = {name: self.store.tensor(name).unique().tolist() for name in written}
        assert all(len(each) == 1 for each in values.values())
        return {name: value for name, (value,) in values.items()}

    def close(self) -> None:
        self.points.close()
        self.store.close()


class Executions(RuleBasedStateMachine):
    """A keeper of states through executions with different plans, and a model of what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name) / "recovery" / "job-1" / "memoryx-0"
        self.keeper = Keeper(self.folder)
        self.progress = Progress("update")
        self.values: dict[str, int] = {}
        self.places: set[str] = set()
        self.points: dict[int, Mapping[str, int]] = {}
        self.number = self.count = 0

    @initialize(names=some)
    def begin(self, names: set[str]) -> None:
        self.load(names)

    @rule(names=some)
    def load(self, names: set[str]) -> None:
        """The plan of another execution."""
        missing = self.keeper.points.load(required_of(names), 0)
        self.places = names | self.values.keys()
        assert set(missing) == names - self.values.keys()

    @rule(names=some)
    def write(self, names: set[str]) -> None:
        """A kernel of a step, which may commit to no state at all; or the client."""
        written = names & self.places
        self.count += 1
        if self.keeper.store.copies_on_write:
            self.keeper.store.before_write(written)
        for name in written:
            self.keeper.store.tensor(name).fill_(self.count)
        self.keeper.store.mark_written(written)
        self.values |= dict.fromkeys(written, self.count)

    @rule(last=strategies.booleans(), waits=strategies.booleans())
    def keep(self, last: bool, waits: bool) -> None:
        """Before the first step of an execution, or after the last. waits: until it is complete."""
        self.number += 1
        if last:
            self.keeper.points.expect(node_pb2.Start(last_recovery_point=self.number))
            self.keeper.points.keep_last(self.progress)
        else:
            self.keeper.points.expect(node_pb2.Start(recovery_point=self.number))
            self.keeper.points.keep_first(self.progress)
        self.points[self.number] = dict(self.values)
        if waits:
            self.settle()

    @rule(names=some, back=strategies.integers(0, 3))
    def put_back(self, names: set[str], back: int) -> None:
        """Somebody has died: the states are those of a point again, in the process that has kept them."""
        number = self.number - back
        if number in self.points:
            self.settle()
            missing = self.keeper.points.load(required_of(names), number)
            self.values = dict(self.points[number])
            self.places = names | self.values.keys()
            assert set(missing) == names - self.values.keys()
            assert self.keeper.values() == self.values

    def settle(self) -> None:
        """Wait until all is done that the thread has to do."""
        done = threading.Event()
        self.keeper.points._do(done.set)
        assert done.wait(SECONDS)
        while not self.keeper.kept.empty():
            assert not self.keeper.kept.get().given_up

    def teardown(self) -> None:
        """All points are found by a process that has just come."""
        self.settle()
        self.keeper.close()
        for number, values in self.points.items():
            other = Keeper(self.folder)
            other.points.load(required_of(set()), number)
            found = other.values()
            other.close()
            assert found == values, f"point {number}"
        self.temporary.cleanup()


TestExecutions = pytest.mark.timeout(300)(Executions.TestCase)  # to find a defect's shortest example takes its time
TestExecutions.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
