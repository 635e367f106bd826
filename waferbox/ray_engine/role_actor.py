"""The Ray actor of a role process: it starts the process on its host, and ends when the process ends.

Ray restarts an actor that has ended, on another host if its host is lost. After an early exit of the process the actor
stays instead and returns the exit status, and the launcher decides about a restart.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence

import ray
from ray.util import get_node_ip_address

from waferbox import settings
from waferbox.cluster.supervised_process import EARLY_EXIT_SECONDS
from waferbox.launch.spawn import spawn_python
from waferbox.ray_engine.credentials import Credentials

OWN_HOST = "{host}"  # stands, in an argument, for the address of the actor's host


class RoleActor:
    """The class of the actor, with which the process dies. Ray calls the methods from several threads."""

    def __init__(self, module: str, arguments: Sequence[str], credentials: Credentials) -> None:
        own_host = get_node_ip_address()
        self._host = own_host if any(OWN_HOST in word for word in arguments) else ""
        self._folder, variables = credentials.lay_out()
        os.environ.update(variables)
        os.environ.setdefault(settings.LOG_LEVEL.name, "warning")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as ForkingLauncher sets it
        # Ray has put the runtime environment on the actor's path; the process needs it too.
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._ending = threading.Event()
        self._ended = threading.Event()
        self._status = 0  # of the process, once it has ended
        self._child = spawn_python(module, [word.replace(OWN_HOST, own_host) for word in arguments])
        threading.Thread(target=self._end_with_child, name="end-with-child", daemon=True).start()

    @ray.method(max_task_retries=-1)
    def process(self) -> tuple[str, int]:
        """The host part of the process's address, empty for a loopback address, and its id on its host."""
        return self._host, self._child.pid

    def wait(self) -> int:
        """Waits for the exit status after an early exit; after another exit the actor ends, and the call fails."""
        self._ended.wait()
        return self._status

    def end(self) -> None:
        """Ends the process; the actor stays."""
        self._ending.set()
        self._child.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_with_child(self) -> None:
        began = time.monotonic()
        self._status = self._child.wait()
        if not self._ending.is_set() and time.monotonic() - began >= EARLY_EXIT_SECONDS:
            shutil.rmtree(self._folder, ignore_errors=True)
            print(f"the process {self._child.pid} ended with status {self._status}", file=sys.stderr, flush=True)
            os._exit(1)  # Ray takes it for a failure, and restarts the actor
        self._ended.set()
