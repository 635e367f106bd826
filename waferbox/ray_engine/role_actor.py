"""The actor of a role process, on whatever host Ray puts it: it starts the process, and ends when that ends.

Ray starts an actor that has ended so anew, elsewhere if its host is gone. A process that has lived for a moment only is
not worth that: then the actor stays, and says so, and whoever has asked for the process decides.
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

OWN_HOST = "{host}"  # in an argument: the address of the host where the actor is


class RoleActor:
    """What Ray makes an actor. The process dies with the actor's, which has started it."""

    def __init__(self, module: str, arguments: Sequence[str], credentials: Credentials) -> None:
        own_host = get_node_ip_address()
        self._host = own_host if any(OWN_HOST in word for word in arguments) else ""
        self._folder, variables = credentials.lay_out()
        os.environ.update(variables)
        os.environ.setdefault(settings.LOG_LEVEL.name, "warning")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as of the fork server
        # What Ray has put there for the actor, its runtime environment, is the process's too.
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._ending = threading.Event()
        self._ended = threading.Event()
        self._status = 0  # of the process, once it has ended
        self._child = spawn_python(module, [word.replace(OWN_HOST, own_host) for word in arguments])
        threading.Thread(target=self._end_with_child, name="end-with-child", daemon=True).start()

    @ray.method(max_task_retries=-1)
    def process(self) -> tuple[str, int]:
        """The host part of its address, if that is the host's own, else nothing; and its process id there."""
        return self._host, self._child.pid

    def wait(self) -> int:
        """The exit status of a process that has not lived for long; for another the call fails, with the actor."""
        self._ended.wait()
        return self._status

    def end(self) -> None:
        """End the process; the actor stays."""
        self._ending.set()
        self._child.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_with_child(self) -> None:
        began = time.monotonic()
        self._status = self._child.wait()
        if not self._ending.is_set() and time.monotonic() - began >= EARLY_EXIT_SECONDS:
            shutil.rmtree(self._folder, ignore_errors=True)
            print(f"the process {self._child.pid} ended with status {self._status}", file=sys.stderr, flush=True)
            os._exit(1)  # unasked, as Ray sees it: it starts the actor anew
        self._ended.set()
