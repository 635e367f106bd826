"""The time of a step by layer: what is measured, and that measuring changes nothing else."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from waferbox.links.hub import Hub
from waferbox.runtime import layer_times, program
from waferbox.runtime.program import Entry, Program
from waferbox.runtime.schedule import StepSchedule
from wsc.v1 import node_pb2, observation_pb2

STEPS = 6


class Clock:
    """A clock that only the actions of a program advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int, int]] = []  # of actions: their names, the step and the repetition

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    return clock


def run(clock: Clock, *, measures_layers: bool) -> Program:
    """Runs a step with a loop, an action without a layer, and one for outputs alone, which leave every third step."""
    made = Program(Hub(), "compute", measures_layers=measures_layers)

    def add(name: str, seconds: float, what: str, layer: str, *, only_outputs: bool = False) -> None:
        def action(step: int) -> None:
            clock.now += seconds
            clock.calls.append((name, step, made.repetition))

        made.add_entry(Entry(action, what, name, only_outputs, layer=layer))

    add("batch", 0.1, "wait", "")
    add("weights", 0.2, "wait", "fc1")
    made.begin_loop(2)
    add("forward", 0.3, "compute", "fc1")
    add("other", 0.5, "compute", "fc2")
    made.end_loop()
    add("gradients", 0.4, "send", "fc1")
    add("outputs", 0.7, "send", "fc2", only_outputs=True)
    schedule = StepSchedule.from_start(node_pb2.Start(epoch=1, num_steps=STEPS, activation_steps=3))
    made.run(schedule)
    return made


def shown(times: Iterator[observation_pb2.LayerTime]) -> Sequence[tuple[str, float, float, float]]:
    return [(each.layer, round(each.compute, 6), round(each.wait, 6), round(each.send, 6)) for each in times]


def test_the_times_of_a_layer_are_those_of_its_actions_in_the_measured_steps(clock: Clock) -> None:
    layers = run(clock, measures_layers=True).progress.layers
    assert layers is not None
    # All steps but the first are measured, as each takes longer than the interval; outputs leave in two of these five.
    assert shown(layers.means()) == [("", 0.0, 0.1, 0.0), ("fc1", 0.6, 0.2, 0.4), ("fc2", 1.0, 0.0, 0.28)]


def test_measuring_leaves_the_actions_and_their_order_as_they_are(clock: Clock) -> None:
    run(clock, measures_layers=True)
    measured, clock.calls = clock.calls, []
    assert run(clock, measures_layers=False).progress.layers is None
    assert measured == clock.calls


def test_steps_are_measured_at_intervals(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "INTERVAL_SECONDS", 5.0)  # a step takes 2.3 s, or 3.0 s with outputs
    steps: list[int] = []
    measure = layer_times.LayerTimes.run

    def note(times: layer_times.LayerTimes, *args: Any, **kwargs: Any) -> None:
        steps.append(kwargs["step"])
        measure(times, *args, **kwargs)

    monkeypatch.setattr(layer_times.LayerTimes, "run", note)
    run(clock, measures_layers=True)
    assert sorted(set(steps)) == [2, 4]
