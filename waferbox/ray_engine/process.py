"""A role process on a Ray cluster, as its launcher knows it: an actor, which Ray may start anew, elsewhere."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from waferbox.cluster.place import described

END_SECONDS: Final = 5.0  # for a process to end when it is asked to


class RayProcess:
    """It has ended when Ray does not start its actor anew, or when it had lived for a moment only. Thread-safe."""

    def __init__(
        self, module: str, actor: Any, tell: Callable[[Sequence[str]], None], on_closed: Callable[[], None]
    ) -> None:
        self.module = module
        self.host = ""
        self.pid = 0
        self._actor = actor
        self._tell = tell
        self._on_closed = on_closed
        self._closed = False
        self._status: int | None = None
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        self._follower = threading.Thread(target=self._follow, name=f"follow-{module}", daemon=True)
        self._follower.start()

    def fileno(self) -> int:
        return self._ended

    def poll(self) -> int | None:
        return self._status

    def terminate(self) -> None:
        """Ask it to end; nobody waits for that."""
        self.ask_to_end()

    def ask_to_end(self) -> Any:
        """What Ray gives for the answer, or None where there is nobody to ask."""
        try:
            return self._actor.end.remote()
        except RayError:
            return None

    def close(self) -> int:
        if not self._closed:
            self._closed = True
            if self._status is None and (answer := self.ask_to_end()) is not None:
                # Where its host does not answer, Ray ends what is left of it.
                with contextlib.suppress(RayError, GetTimeoutError):
                    ray.get(answer, timeout=END_SECONDS)
            self.kill()
            self._on_closed()
        return self._status or 0

    def kill(self) -> None:
        """The actor, and with it the process."""
        self._closed = True
        with contextlib.suppress(RayError):  # there is none
            ray.kill(self._actor, no_restart=True)
        self._follower.join(END_SECONDS)

    def _follow(self) -> None:
        """Know where it is, and its end."""
        before = ""
        try:
            while True:
                self.host, self.pid = ray.get(self._actor.process.remote())
                if before:
                    self._tell([f"{self.module} ({before}) ended; Ray has started it again as {described(self)}"])
                before = described(self)
                try:
                    self._status = ray.get(self._actor.wait.remote())
                    break
                except ActorUnavailableError:
                    if self._closed:
                        raise
                    # Until Ray has started it again, there is nobody who could hang.
                    self.pid, self.host = 0, ""
        except RayError as error:
            self._status = 1
            if not self._closed:
                self._tell([f"{self.module}: {str(error).splitlines()[0]}"])
        os.eventfd_write(self._ended, 1)
