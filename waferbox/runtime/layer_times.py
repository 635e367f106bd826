"""The time of a wafer's step by layer, measured in some steps."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from wsc.v1 import observation_pb2

INTERVAL_SECONDS: Final = 0.5  # between two measured steps: measuring costs a clock reading for each action
_WAIT, _SEND, _WORK = range(3)


class TimedAction(Protocol):
    """An action of a program; see `waferbox.runtime.program.Entry`."""

    @property
    def action(self) -> Callable[[int], None]: ...
    @property
    def what(self) -> str: ...
    @property
    def layer(self) -> str: ...
    @property
    def only_outputs(self) -> bool: ...


class LayerTimes:
    """The seconds that a program has spent on each layer, in the steps that were measured.

    Written by the thread of the steps. Another thread may read it meanwhile, which is accurate enough for reports.
    """

    def __init__(self, entries: Sequence[TimedAction]) -> None:
        """entries: all actions of the program, in order."""
        layers = list(dict.fromkeys(entry.layer for entry in entries))
        kinds = {"wait": _WAIT, "send": _SEND}
        # The place of each action's time, and the layers' times: three of each layer, one after the other.
        self._places = [3 * layers.index(entry.layer) + kinds.get(entry.what, _WORK) for entry in entries]
        self._seconds = [0.0] * (3 * len(layers))
        self._layers = layers
        self._steps = 0

    def run(self, entries: Sequence[TimedAction], first: int, *, outputs_leave: bool, step: int) -> None:
        """Runs some of the program's actions, and adds their times.

        Args:
            entries: the actions; those for outputs alone are left out unless these leave.
            first: the number of the first one in the program.
            outputs_leave: whether outputs leave in this step.
            step: of the epoch.
        """
        now, seconds, places = time.perf_counter, self._seconds, self._places
        begin = now()
        for number, entry in enumerate(entries, first):
            if entry.only_outputs and not outputs_leave:
                continue
            entry.action(step)
            end = now()
            seconds[places[number]] += end - begin
            begin = end

    def end_step(self) -> None:
        """Counts a step whose actions were all run by `run`."""
        self._steps += 1

    def means(self) -> Iterator[observation_pb2.LayerTime]:
        """Yields the mean times of a measured step, layer by layer; none before the first."""
        steps, seconds = self._steps, self._seconds
        for number, layer in enumerate(self._layers if steps else ()):
            wait, send, work = (spent / steps for spent in seconds[3 * number : 3 * number + 3])
            yield observation_pb2.LayerTime(layer=layer, compute=work, wait=wait, send=send)
