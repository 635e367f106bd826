"""Processes of a simulated cluster: each has an event loop of its own, and all loops share one virtual clock.

A loop calls one callback at a time, in an order that depends on the world's seed alone. A process that is killed leaves
its coroutines where they are, as SIGKILL does; one that is stalled runs what has become due when it goes on, as after
SIGSTOP and SIGCONT.
"""

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import Any, TypeAlias

_Event: TypeAlias = "tuple[float, int, Process | None, Handle]"  # time, number, whose event it is, what it does

# --- The world --------------------------------------------------------------------------------------------------------

EPOCH_SECONDS = 1_700_000_000  # the time of day at which the worlds of all seeds begin


class Hang(AssertionError):
    """Raised if something is awaited, and no event is left that could end the wait."""


class World:
    """All processes, and the events that lie ahead of them, in the order of their times."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.processes: list[Process] = []
        self.journal: list[tuple[float, str]] = []  # what happened, for the report of a failure
        self.defects: list[str] = []  # of all processes
        self.blocking_seconds = self.random.choice([0.005, 0.05, 0.5])  # at most, of a call that an executor makes
        self._events: list[_Event] = []
        self._ready: deque[_Event] = deque()  # those of the time at which they were added
        self._next_number = itertools.count().__next__  # events of one time happen in the order of their numbers

    def note(self, text: str) -> None:
        """Adds a line to the journal."""
        self.journal.append((self.now, text))

    def at(self, when: float, process: "Process | None", handle: "Handle") -> None:
        """Adds an event. process: the one that it belongs to; None: the world's own."""
        if when <= self.now:
            self.soon(process, handle)
        else:
            heapq.heappush(self._events, (when, self._next_number(), process, handle))

    def soon(self, process: "Process | None", handle: "Handle") -> None:
        """Adds an event of this time, after all that were added before."""
        self._ready.append((self.now, self._next_number(), process, handle))

    def after(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> None:
        """Calls a function of the world itself after so many seconds."""
        self.at(self.now + seconds, None, Handle(callback, arguments))

    def run(self, seconds: float, until: Callable[[], object] = lambda: False) -> bool:
        """Runs events until a condition holds, at most for so many seconds; returns whether it holds.

        Raises Hang if it does not hold and no event is left.
        """
        try:
            return self._run(self.now + seconds, until)
        finally:
            asyncio._set_running_loop(None)

    def _run(self, end: float, until: Callable[[], object]) -> bool:
        events, ready = self._events, self._ready
        running: Process | None = None  # whose loop is the running one
        while not until():
            if ready and not (events and events[0] < ready[0]):
                event = ready.popleft()
            elif events:
                event = heapq.heappop(events)
            else:
                raise Hang("nothing is left that could happen")
            when, number, process, handle = event
            if when > end:
                heapq.heappush(events, event)
                self.now = end
                return bool(until())
            self.now = when
            if handle.is_cancelled or (process is not None and not process.is_alive):
                continue
            if process is not running:
                asyncio._set_running_loop(None if process is None else process.loop)
                running = process
            if process is None:
                handle.callback(*handle.arguments)
                continue
            if process.stalled_until > when:
                # With its number: what arrives at a stalled process stays in order, also if it is stalled again.
                heapq.heappush(events, (process.stalled_until, number, process, handle))
                continue
            if (early := handle.when - when + process.stalled) > 1e-9:  # the time of its loop stood still meanwhile
                self.at(when + early, process, handle)
                continue
            handle.callback(*handle.arguments)
            assert not self.defects, self.defects
            if process.after_event is not None:
                process.after_event()
        return True

    def close(self) -> None:
        """Ends all processes."""
        for process in self.processes:
            process.bury()


class Handle:
    """A callback that will be called, unless it is cancelled; an asyncio.TimerHandle for its users."""

    __slots__ = ("arguments", "callback", "is_cancelled", "when")

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...], when: float = 0.0) -> None:
        """when: the first time of its process at which it may be called."""
        self.callback = callback
        self.arguments = arguments
        self.is_cancelled = False
        self.when = when

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


# --- Processes --------------------------------------------------------------------------------------------------------


class Process:
    """A process of the simulated cluster. As a Clock it is that of its host, which may differ from others."""

    def __init__(self, world: World, name: str, host: str = "") -> None:
        self.world = world
        self.name = name
        self.host = host or name
        self.pid = len(world.processes) + 1
        self.is_alive = True
        self.has_vanished = False  # with its host, which closes no connection
        self.status: int | None = None  # after its end
        self.ended_at = 0.0
        self.stalled_until = 0.0
        self.stalled = 0.0  # seconds of all stalls
        self.on_end: list[Callable[[], object]] = []  # called in the world, once
        self.after_event: Callable[[], None] | None = None  # checks what an event of the process has changed
        self._skew = Random(self.host).uniform(-5.0, 5.0)
        self.loop = VirtualLoop(self)  # type: ignore[abstract]  # has what is called
        world.processes.append(self)

    def monotonic(self) -> float:
        """Returns the time of the event loop, which stands still while the process is stalled."""
        return self.world.now - self.stalled

    def world_time(self, monotonic: float) -> float:
        """Returns the first time of the world at which a time of the event loop is reached, if no stall follows."""
        at = monotonic + self.stalled
        while at - self.stalled < monotonic:  # rounded down, so that a wait for it would never end
            at = math.nextafter(at, math.inf)
        return at

    def time_ns(self) -> int:
        return int((EPOCH_SECONDS + self.world.now + self._skew) * 1e9)

    def start(self, main: Callable[[], Coroutine[Any, Any, int]]) -> None:
        """Begins the process; it ends with the status that its main coroutine returns."""

        async def run() -> None:
            try:
                self.exit(await main())
            except Exception as error:  # noqa: BLE001 - a defect of the simulated process
                self.world.defects.append(f"{self.name}: {error!r}")
                self.exit(1)

        self.loop.call_soon(lambda: self.loop.create_task(run()))

    def exit(self, status: int) -> None:
        """Ends the process."""
        if not self.is_alive:
            return
        self.world.note(f"{self.name} (pid {self.pid}) ends with status {status}")
        self.is_alive, self.status, self.ended_at = False, status, self.world.now
        for callback in self.on_end:
            self.world.after(0.0, callback)

    def kill(self) -> None:
        self.exit(-9)

    def vanish(self) -> None:
        """Ends the process with its host, as by a power cut: its peers are not notified."""
        self.has_vanished = True
        self.exit(-9)

    def stall(self, seconds: float) -> None:
        """Stops the process for so many seconds."""
        if self.is_alive:
            self.world.note(f"{self.name} (pid {self.pid}) stalls for {seconds:.1f} s")
            before = max(self.stalled_until, self.world.now)
            self.stalled_until = max(self.stalled_until, self.world.now + seconds)
            self.stalled += self.stalled_until - before

    def bury(self) -> None:
        """Takes the coroutines of a process apart; nothing that they do on the way has an effect."""
        self.is_alive = False
        self.loop.close()


class VirtualLoop(asyncio.AbstractEventLoop):
    """The event loop of a simulated process. What would block is done at once, and its result comes a while later.

    Callbacks have no contexts: no process keeps anything in context variables.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._tasks: list[asyncio.Task[Any]] = []  # nobody else may have them while they wait
        self._most_tasks = 20  # before those that are done are dropped

    def time(self) -> float:
        return self._process.monotonic()

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return not self._process.is_alive

    def get_debug(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        handle = Handle(callback, args)
        if self._process.is_alive:
            self._world.soon(self._process, handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        handle = Handle(callback, args, when)
        if self._process.is_alive:
            self._world.at(self._process.world_time(when), self._process, handle)
        return handle

    def arrive_at(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """Calls a function at a time of the world: a message arrives."""
        if self._process.is_alive:
            self._world.at(when, self._process, Handle(callback, args))

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Any = None,
    ) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        if len(self._tasks) >= self._most_tasks:  # a callback of each that is done would be an event more
            self._tasks = [each for each in self._tasks if not each.done()]
            self._most_tasks = 2 * len(self._tasks) + 20
        self._tasks.append(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - passed on, as an executor does
                future.set_exception(error)

        self.call_later(self._world.random.random() * self._world.blocking_seconds, run)
        return future

    def set_exception_handler(self, handler: object) -> None:
        """Exceptions of callbacks end the simulation."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._process.is_alive:
            error = context.get("exception")
            self._world.defects.append(f"{self._process.name}: {context['message']}: {error!r}")

    def close(self) -> None:
        for task in self._tasks:
            with suppress(RuntimeError, StopIteration):  # a coroutine that waits on its way out cannot be helped
                coroutine = task.get_coro()
                assert coroutine is not None
                coroutine.close()
