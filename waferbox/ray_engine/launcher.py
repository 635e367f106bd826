"""The launcher that starts role processes on a Ray cluster, as actors. Processes with descriptors run on this host."""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from waferbox import deadlines
from waferbox.cluster.cluster import print_messages
from waferbox.cluster.launcher import Process
from waferbox.cluster.supervised_process import described
from waferbox.host.descriptors import readable
from waferbox.launch.local_clusters import ClusterError
from waferbox.launch.spawn import SpawnError, spawn_python
from waferbox.ray_engine.credentials import own_credentials
from waferbox.ray_engine.role_actor import OWN_HOST, RoleActor
from waferbox.ray_engine.settings import STRATEGY, RaySettings, lay_out, missing_resources
from waferbox.rpc.address import is_loopback, split_address
from waferbox.security.tokens import is_here
from waferbox.settings import REPLACEMENT_SECONDS


class RayProcess:
    """A role process on a Ray cluster: an actor, which Ray may restart on another host. Thread-safe.

    The process counts as ended after an early exit, or once Ray does not restart its actor any more.
    """

    def __init__(
        self, module: str, actor: Any, on_messages: Callable[[Sequence[str]], None], on_closed: Callable[[], None]
    ) -> None:
        """Begins to follow an actor.

        Args:
            module: of the role, for messages.
            actor: the handle of a RoleActor.
            on_messages: called with messages for the user, in a thread of the object.
            on_closed: called once, at the end of `close`.
        """
        self.module = module
        self.host = ""
        self.pid = 0
        self._actor = actor
        self._on_messages = on_messages
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
        self.request_end()

    def request_end(self) -> Any:
        """Requests the end of the process; returns Ray's reference to the result, None if the actor has ended."""
        try:
            return self._actor.end.remote()
        except RayError:
            return None

    def close(self) -> int:
        if not self._closed:
            self._closed = True
            if self._status is None and (result := self.request_end()) is not None:
                # If the host does not answer, the actor is killed below.
                with contextlib.suppress(RayError, GetTimeoutError):
                    ray.get(result, timeout=deadlines.START.ray_end)
            self.kill()
            self._on_closed()
        return self._status or 0

    def kill(self) -> None:
        """Kills the actor, and with it the process."""
        self._closed = True
        with contextlib.suppress(RayError):  # the actor has ended
            ray.kill(self._actor, no_restart=True)
        self._follower.join(deadlines.START.ray_end)

    def _follow(self) -> None:
        """Follows the actor through its restarts, until its end."""
        before = ""
        try:
            while True:
                self.host, self.pid = ray.get(self._actor.process.remote())
                if before:
                    message = f"{self.module} ({before}) ended; Ray has started it again as {described(self)}"
                    self._on_messages([message])
                before = described(self)
                try:
                    self._status = ray.get(self._actor.wait.remote())
                    break
                except ActorUnavailableError:
                    if self._closed:
                        raise
                    # Until Ray has restarted the actor there is no process that could hang.
                    self.pid, self.host = 0, ""
        except RayError as error:
            self._status = 1
            if not self._closed:
                self._on_messages([f"{self.module}: {str(error).splitlines()[0]}"])
        os.eventfd_write(self._ended, 1)


# --- The launcher -----------------------------------------------------------------------------------------------------


WAIT_NOTICE_SECONDS: Final = 5.0  # of waiting for room, before a message lists the missing resources
CHECK_SECONDS: Final = 0.25  # between two checks for room
MAX_RESTARTS: Final = 100  # of an actor by Ray, over the life of a cluster; early exits do not count
ACTOR_THREADS: Final = 8  # concurrent calls to an actor: one waits for its process


class RayLauncher:
    """Starts each role process as an actor, in one placement group. Ray ends all of them with this process.

    Thread-safe.
    """

    def __init__(self, settings: RaySettings) -> None:
        """Connects to Ray. Raises ClusterError: there is none.

        Args:
            settings: of Ray.
        """
        _connect(settings)
        # The coordinators, which start on this host, inherit the variable.
        os.environ.setdefault(REPLACEMENT_SECONDS.name, f"{deadlines.START.ray_replacement:g}")
        self._settings = settings
        self._lock = threading.Lock()
        self._free: list[tuple[str, int]] = []
        self._running: list[RayProcess] = []
        self._never_ready = os.eventfd(0, os.EFD_CLOEXEC)

    @property
    def num_hosts(self) -> int:
        """The number of Ray's hosts."""
        return len(_hosts())

    def reserve(self, roles: Mapping[str, int], stop_requests: Sequence[int] = ()) -> None:
        """Waits until Ray has room for the processes of the cluster. On failure the launcher is closed.

        Args:
            roles: the number of processes of each role module.
            stop_requests: descriptors; one that becomes readable requests the end of the cluster.

        Raises:
            ClusterError: there is no room in time, or a stop was requested.
        """
        self._layout = lay_out(roles, self._settings.resources)
        self._free = list(self._layout.slots)
        try:
            self._credentials = own_credentials()
            self._group = placement_group([dict(bundle) for bundle in self._layout.bundles], strategy=STRATEGY)
            self._wait_for_room(stop_requests)
        except BaseException:
            self.close()
            raise

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> Process:
        with self._lock:
            slot = next((slot for slot in self._free if slot[0] == module), None)
            # Management and the vendor gateway have no slot: Ray does not pass the descriptors that they need.
            if slot is None:
                return spawn_python(module, arguments, fds)
            self._free.remove(slot)
        requested = dict(self._settings.resources[module])
        try:
            actor = (
                ray.remote(RoleActor)
                .options(
                    num_cpus=requested.pop("CPU", 0.0),
                    num_gpus=requested.pop("GPU", 0.0),
                    memory=requested.pop("memory", None),
                    resources=requested,
                    max_restarts=MAX_RESTARTS,
                    max_concurrency=ACTOR_THREADS,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, slot[1]),
                )
                .remote(module, list(arguments), self._credentials)
            )
        except RayError as error:
            self._release(slot)
            raise SpawnError(f"Ray cannot start {module}: {error}") from error
        process = RayProcess(module, actor, print_messages, lambda: self._release(slot))
        with self._lock:
            self._running.append(process)
        return process

    def listen(self, management_host: str) -> str:
        if not is_loopback(management_host):
            return f"{OWN_HOST}:0"
        elsewhere = [host["NodeManagerAddress"] for host in _hosts() if not is_here(host["NodeManagerAddress"])]
        if elsewhere:
            raise SpawnError(
                f"Ray has hosts ({', '.join(elsewhere)}) that cannot reach management at {management_host}: give this "
                "host's address, as in --listen HOST:0, with --tls, or with --insecure in a trusted network"
            )
        return f"{management_host}:0"

    def fileno(self) -> int:
        return self._never_ready  # the end of Ray ends this process too

    def end(self) -> str:
        return ""

    @property
    def was_killed(self) -> bool:
        return False

    def restart(self) -> int:
        raise SpawnError("Ray cannot be restarted from here")

    def close(self) -> None:
        with self._lock:
            running, self._running = self._running, []
        results = [result for process in running if (result := process.request_end()) is not None]
        if results:
            ray.wait(results, num_returns=len(results), timeout=deadlines.START.ray_end)
        for process in running:
            process.kill()
        ray.shutdown()  # removes the placement group
        if self._never_ready >= 0:
            os.close(self._never_ready)
            self._never_ready = -1

    def _release(self, slot: tuple[str, int]) -> None:
        with self._lock:
            self._free.append(slot)

    def _wait_for_room(self, stop_requests: Sequence[int]) -> None:
        began, is_reported = time.monotonic(), False
        while not self._group.wait(CHECK_SECONDS):
            waited = time.monotonic() - began
            if readable(stop_requests, 0.0):
                raise ClusterError("the cluster was stopped while it waited for room on Ray")
            if waited > deadlines.START.ray_room:
                raise ClusterError(
                    f"Ray has had no room for the cluster within {deadlines.START.ray_room:g} s:\n{self._missing()}\n"
                    "Add hosts to Ray, wait for the end of other work, or request less, as in --resource wafer.CPU=0.5"
                )
            if waited > WAIT_NOTICE_SECONDS and not is_reported:
                print_messages([f"waiting for room on Ray, {deadlines.START.ray_room:g} s at most:\n{self._missing()}"])
                is_reported = True

    def _missing(self) -> str:
        return missing_resources(self._layout, _hosts(), ray.available_resources())


def _hosts() -> Sequence[Mapping[str, Any]]:
    return [host for host in ray.nodes() if host["Alive"]]


def _connect(settings: RaySettings) -> None:
    """Raises ClusterError."""
    _check_reachable(settings.address)
    on_termination = signal.getsignal(signal.SIGTERM)
    runtime_env = None if settings.runtime_env is None else dict(settings.runtime_env)
    try:
        ray.init(address=settings.address, runtime_env=runtime_env, logging_level=logging.WARNING)
    except (RayError, ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise ClusterError(_no_ray(settings.address, str(error).partition("\n")[0])) from error
    finally:
        signal.signal(signal.SIGTERM, on_termination)  # ray.init replaces the handler of the cluster


def _check_reachable(address: str) -> None:
    """Raises ClusterError if nothing listens at the address; Ray would end this process, after two minutes."""
    if address == "auto":
        return
    try:
        host, port = split_address(address.removeprefix("ray://"))
        socket.create_connection((host.strip("[]"), port), deadlines.START.ray_connect).close()
    except (OSError, ValueError) as error:
        raise ClusterError(_no_ray(address, str(error))) from error


def _no_ray(address: str, why: str) -> str:
    where = "on this host" if address == "auto" else f"at {address}"
    return (
        f"there is no Ray cluster {where} ({why}): start one with `ray start --head`, join hosts with "
        "`ray start --address HOST:PORT`, and name it with --address"
    )
