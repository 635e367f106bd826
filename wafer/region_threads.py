"""The threads that regions are run in: how far each is, where they wait for one another, and how they end.

A thread tells how far it is by writing a number, and looks at the others' numbers; only where it has to wait does it
take a lock. The interpreter sees to the order: whoever goes to sleep says so before it looks for the last time, and
whoever moves on writes its number before it looks for sleepers.
"""

import threading
from collections.abc import Callable, Sequence

import torch

from interconnect.links.hub import Stopped
from interconnect.threads import GuardedThread
from nodes.steps.program import Entry, run_recorded
from nodes.steps.schedule import StepSchedule
from nodes.telemetry.progress import Progress


class Positions:
    """How far each thread is: numbers that grow from instruction to instruction and from step to step."""

    def __init__(self, num_threads: int, most_instructions: int) -> None:
        """most_instructions: of one thread in a step."""
        self._per_step = most_instructions + 2
        self._done = [0] * num_threads
        self._changed = threading.Condition()
        self._sleeping = 0
        self._stopped = False

    def begun(self, step: int) -> int:
        """Of a thread that has begun a step."""
        return step * self._per_step

    def after(self, step: int, index: int) -> int:
        """Of a thread that has done the instruction of this index, from 0, of a step."""
        return step * self._per_step + index + 1

    def ended(self, step: int) -> int:
        """Of a thread that has ended a step."""
        return (step + 1) * self._per_step - 1

    def reach(self, thread: int, position: int) -> None:
        """This thread has come so far; called by it alone."""
        self._done[thread] = position
        if self._sleeping:
            with self._changed:
                self._changed.notify_all()

    def has_reached(self, thread: int, position: int) -> bool:
        return self._done[thread] >= position

    def wait(self, thread: int, position: int) -> None:
        """Until a thread has come so far. Raises Stopped."""
        done = self._done
        if done[thread] >= position:
            return
        with self._changed:
            self._sleeping += 1
            try:
                while done[thread] < position:
                    if self._stopped:
                        raise Stopped
                    self._changed.wait()
            finally:
                self._sleeping -= 1

    def stop(self) -> None:
        """Makes every wait raise Stopped. From any thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class RegionThreads:
    """All threads but the first, which is the one of the execution: it begins each step, and ends it."""

    def __init__(
        self, entries: Sequence[Sequence[Entry]], positions: Positions, on_failure: Callable[[], None]
    ) -> None:
        """entries: of each of these threads, in order. on_failure: ends the waits of the first thread."""
        self._positions = positions
        self._on_failure = on_failure
        self._threads = [
            GuardedThread(self._runner(number, list(own)), name=f"regions-{number}", on_defect=self._failed)
            for number, own in enumerate(entries, 1)
        ]
        self._schedule: StepSchedule | None = None
        self._progress: Progress | None = None
        self.error: Exception | None = None

    def start(self, schedule: StepSchedule, progress: Progress) -> None:
        self._schedule, self._progress = schedule, progress
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop, and join."""
        self._positions.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _runner(self, number: int, entries: Sequence[Entry]) -> Callable[[], None]:
        actions = [entry.action for entry in entries]

        def run() -> None:
            schedule, progress, positions = self._schedule, self._progress, self._positions
            assert schedule is not None
            assert progress is not None
            try:
                with torch.inference_mode():
                    for step in range(1, schedule.num_steps + 1):
                        positions.wait(0, positions.begun(step))
                        recorder = progress.recorder
                        if recorder is None:
                            for action in actions:
                                action(step)
                        else:
                            run_recorded(entries, recorder, schedule, step)
                        positions.reach(number, positions.ended(step))
            except Stopped:
                return

        return run

    def _failed(self, error: Exception) -> None:
        self.error = self.error or error
        self._positions.stop()
        self._on_failure()
