"""What an execution has for the client, which pulls by name and step what comes in order."""

import threading
from collections.abc import Callable, Sequence

import torch

from cstorch.errors import CstorchError

CHECK_SECONDS = 1.0


class CallEndedError(Exception):
    """Nobody waits for the answer any more."""


class Outputs:
    """Outputs and checkpoints of the steps that the client has not passed. Thread-safe.

    How many there may be is bounded by the coordinator, which hears which steps are passed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # of the rest
        self._outputs: dict[int, dict[str, torch.Tensor]] = {}
        self._checkpoints: dict[int, Sequence[str]] = {}  # where the loaders stand
        self._passed = 0
        self._finished = False
        self._failure: CstorchError | None = None

    def put(self, step: int, values: dict[str, torch.Tensor]) -> None:
        with self._changed:
            self._outputs[step] = values
            self._changed.notify_all()

    def put_checkpoint(self, step: int, input_states: Sequence[str]) -> None:
        with self._changed:
            self._checkpoints[step] = input_states
            self._changed.notify_all()

    def finish(self) -> None:
        """All of it has come."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def fail(self, failure: CstorchError) -> None:
        """Nothing more comes. What has come can still be had."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def take_passed(self, step: int) -> tuple[int, list[int]]:
        """The client is done with all steps up to this one, and these are forgotten.

        Returns the last of them that had outputs, or 0, and the checkpoints among them.
        """
        with self._changed:
            if step <= self._passed:
                return 0, []
            self._passed = step
            outputs = [each for each in self._outputs if each <= step]
            for each in outputs:
                del self._outputs[each]
            checkpoints = sorted(each for each in self._checkpoints if each <= step)
            for each in checkpoints:
                del self._checkpoints[each]
            return max(outputs, default=0), checkpoints

    def get(self, name: str, step: int, is_wanted: Callable[[], bool]) -> torch.Tensor:
        """An output, once it is there.

        Raises:
            CstorchError: the execution has failed.
            KeyError: the step has no such output, or the client has passed it.
            CallEndedError: is_wanted() says no.
        """
        self._wait(lambda: step in self._outputs or step <= self._passed, is_wanted)
        with self._changed:
            return self._outputs[step][name]

    def wait_checkpoint(self, step: int, is_wanted: Callable[[], bool]) -> Sequence[str]:
        """Until a checkpoint can be read; returns where the loaders stand. Raises as get."""
        self._wait(lambda: step in self._checkpoints or step <= self._passed, is_wanted)
        with self._changed:
            return self._checkpoints[step]

    def wait_finished(self, is_wanted: Callable[[], bool]) -> None:
        """Until all steps are done. Raises CstorchError, CallEndedError."""
        self._wait(lambda: self._finished, is_wanted)

    def _wait(self, is_there: Callable[[], bool], is_wanted: Callable[[], bool]) -> None:
        with self._changed:
            while not is_there():
                if self._failure is not None:
                    raise self._failure
                if self._finished:
                    return
                if not is_wanted():
                    raise CallEndedError
                self._changed.wait(CHECK_SECONDS)
