"""Faults, and their injection: by a process of the cluster at a named moment, or by this process at a random one."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from cluster_rig import RunningCluster, Surroundings

STOP_SECONDS = 7.0  # longer than a lease lasts
POLL_SECONDS = 0.01
# The victims that are no members of a job, with the names of their processes as far as these are unique.
SERVICES = {
    "coordinator": "coordinator",
    "child": "waferbox.input_process",
    "ingress": "",
    "management": "",
    "fork server": "",
    "launcher": "",
}
ROLE_PROCESSES = {"wafer": "wafer", "memoryx": "memoryx", "swarmx": "swarmx", "worker": "workers"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault: an action on a victim at a moment."""

    victim: str  # a member of the job such as "wafer-0", or one of SERVICES
    moment: str  # one of the hook's; or "random", or "line"
    action: str = "kill"
    at: float = 0  # the count of the step; with "random" the seconds after the first output; with "line" its lines
    epoch: int = 0  # the first in which a moment of the hook's counts
    seconds: float = STOP_SECONDS  # until a stopped process goes on

    def __str__(self) -> str:
        at = f" {self.at:g}" if self.at else ""
        epoch = f" from epoch {self.epoch}" if self.epoch else ""
        duration = f" for {self.seconds:g} s" if self.action == "stop" else ""
        return f"{self.action} {self.victim}{duration} at {self.moment}{at}{epoch}"


class Injector:
    """The injection of the faults of one trial. A context manager; after its exit no process is suspended."""

    def __init__(self, victims: "Victims", orders: Path, faults: Sequence[Fault]) -> None:
        self._victims = victims
        self._orders = orders
        self._faults = faults
        self.times: dict[int, float] = {}  # since 1970, by the fault's place in the sequence
        self._resume_at: dict[int, float] = {}  # by process id
        self._lines = 0  # the lines of output so far
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="injector")

    def __enter__(self) -> "Injector":
        for path in self._orders.iterdir():
            path.unlink()
        for number, fault in enumerate(self._faults):
            if fault.moment not in ("random", "line"):
                order = {name: getattr(fault, name) for name in ("moment", "at", "action", "epoch")}
                order["member"] = fault.victim
                partial = self._orders / f"{number}.writing"
                partial.write_text(json.dumps(order))
                partial.rename(self._orders / f"{number}.order")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for order in self._orders.glob("*.order"):
            order.unlink(missing_ok=True)

    def printed(self, lines: int) -> None:
        """Sets the number of lines that the script has printed. Random moments count from the first line."""
        self._lines = lines

    def _run(self) -> None:
        begin = None
        while not self._over.wait(POLL_SECONDS):
            self._note()
            now = time.monotonic()
            if begin is None and self._lines:
                begin = now
            for number, fault in enumerate(self._faults):
                due = fault.moment == "random" and begin is not None and now - begin >= fault.at
                due |= fault.moment == "line" and self._lines >= fault.at
                if due and number not in self.times:
                    self._injure(number, fault)
            for pid in [pid for pid, at in self._resume_at.items() if at <= now]:
                self._resume(pid)
        self._note()
        for pid in list(self._resume_at):
            self._resume(pid)

    def _note(self) -> None:
        """Reads the faults that processes of the cluster have injected."""
        for number, fault in enumerate(self._faults):
            done = self._orders / f"{number}.done"
            if number not in self.times and done.exists():
                told = json.loads(done.read_text())
                self.times[number] = told["time"]
                if fault.action == "stop":
                    self._resume_at[told["pid"]] = time.monotonic() + fault.seconds

    def _injure(self, number: int, fault: Fault) -> None:
        process = self._victims(fault.victim)
        if process is None:
            return  # it is just being replaced
        self.times[number] = time.time()
        with contextlib.suppress(psutil.NoSuchProcess):
            if fault.action == "stop":
                process.suspend()
                self._resume_at[process.pid] = time.monotonic() + fault.seconds
            elif fault.action == "terminate":
                process.terminate()
            else:
                process.kill()

    def _resume(self, pid: int) -> None:
        del self._resume_at[pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


Victims = Callable[[str], psutil.Process | None]  # returns the present process of a victim; None: there is none


def victims_of(cluster: RunningCluster) -> Victims:
    """Returns the victims of a cluster whose management service lists the members of the job."""

    def find(victim: str) -> psutil.Process | None:
        if victim in SERVICES:
            return _service(cluster.surroundings, victim)
        nodes = []
        with contextlib.suppress(grpc.RpcError):  # the management service is away, after another fault
            nodes = cluster.nodes()
        pids = [node.process_id for node in nodes if node.member == victim and node.job]
        return psutil.Process(pids[0]) if pids and psutil.pid_exists(pids[0]) else None

    return find


def victims_around(surroundings: Surroundings) -> Victims:
    """Returns the victims of a script's own cluster, all of whose nodes are the job's. Member numbers are ignored."""

    def find(victim: str) -> psutil.Process | None:
        if victim in SERVICES:
            return _service(surroundings, victim)
        role, _, number = victim.rpartition("-")
        found = sorted(_named(surroundings, ROLE_PROCESSES[role]), key=lambda process: process.pid)
        return found[int(number)] if int(number) < len(found) else None

    return find


def _service(surroundings: Surroundings, victim: str) -> psutil.Process | None:
    match victim:
        case "management":
            return _find(surroundings, lambda process: {"appliance", "--announce-fd"} <= set(process.cmdline()))
        case "fork server":
            return _find(surroundings, _is_fork_server)
        case "ingress":
            return _find(surroundings, lambda process: "appliance.ingress" in process.cmdline())
        case "launcher":
            return _find(surroundings, lambda process: "waferbox.cluster.embedded" in process.cmdline())
        case _:
            return next(iter(_named(surroundings, SERVICES[victim])), None)


def _is_fork_server(process: psutil.Process) -> bool:
    """What it forks has the same command line."""
    parent = process.parent()
    asked = "waferbox.launch.fork_server" in process.cmdline()
    return asked and parent is not None and "waferbox.launch.fork_server" not in parent.cmdline()


def _named(surroundings: Surroundings, name: str) -> list[psutil.Process]:
    found = []
    for process in surroundings.processes():
        with contextlib.suppress(psutil.Error):
            if process.name() == name:
                found.append(process)
    return found


def _find(surroundings: Surroundings, is_meant: Callable[[psutil.Process], bool]) -> psutil.Process | None:
    for process in surroundings.processes():
        with contextlib.suppress(psutil.Error):
            if is_meant(process):
                return process
    return None
