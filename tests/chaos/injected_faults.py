"""Faults, and who injects them: a process of the cluster itself at a named moment, or this process at a random one."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from cluster_rig import RunningCluster

STOP_SECONDS = 7.0  # longer than a lease lasts
POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to whom, and when."""

    victim: str  # a member of the job such as "wafer-0"; or "coordinator", "management", "child", "fork server"
    moment: str  # one of the hook's; or "random"
    action: str = "kill"
    at: float = 0  # the count of the step; with "random" the seconds after the first output

    def __str__(self) -> str:
        at = f" {self.at:g}" if self.at else ""
        return f"{self.action} {self.victim} at {self.moment}{at}"


class Injector:
    """Injects the faults of one trial. A context manager; on leaving it nobody is suspended."""

    def __init__(self, cluster: RunningCluster, orders: Path, faults: Sequence[Fault]) -> None:
        self._cluster = cluster
        self._orders = orders
        self._faults = faults
        self.times: dict[int, float] = {}  # since 1970, by the fault's place in the sequence
        self._resume_at: dict[int, float] = {}  # by process id
        self._first_output = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="injector")

    def __enter__(self) -> "Injector":
        for path in self._orders.iterdir():
            path.unlink()
        for number, fault in enumerate(self._faults):
            if fault.moment != "random":
                order = {"member": fault.victim, "moment": fault.moment, "at": fault.at, "action": fault.action}
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

    def first_output(self) -> None:
        """The job has begun: random moments are counted from here."""
        self._first_output.set()

    def _run(self) -> None:
        begin = None
        while not self._over.wait(POLL_SECONDS):
            self._note()
            now = time.monotonic()
            if begin is None and self._first_output.is_set():
                begin = now
            for number, fault in enumerate(self._faults):
                due = fault.moment == "random" and begin is not None and now - begin >= fault.at
                if due and number not in self.times:
                    self._injure(number, fault)
            for pid in [pid for pid, at in self._resume_at.items() if at <= now]:
                self._resume(pid)
        self._note()
        for pid in list(self._resume_at):
            self._resume(pid)

    def _note(self) -> None:
        """What processes have done to themselves."""
        for number, fault in enumerate(self._faults):
            done = self._orders / f"{number}.done"
            if number not in self.times and done.exists():
                told = json.loads(done.read_text())
                self.times[number] = told["time"]
                if fault.action == "stop":
                    self._resume_at[told["pid"]] = time.monotonic() + STOP_SECONDS

    def _injure(self, number: int, fault: Fault) -> None:
        process = victim_process(self._cluster, fault.victim)
        if process is None:
            return  # it is just being replaced
        self.times[number] = time.time()
        with contextlib.suppress(psutil.NoSuchProcess):
            if fault.action == "stop":
                process.suspend()
                self._resume_at[process.pid] = time.monotonic() + STOP_SECONDS
            else:
                process.kill()

    def _resume(self, pid: int) -> None:
        del self._resume_at[pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def victim_process(cluster: RunningCluster, victim: str) -> psutil.Process | None:
    """Who has that part now; None: nobody."""
    match victim:
        case "management":
            return _find(cluster, lambda process: {"appliance", "--announce-fd"} <= set(process.cmdline()))
        case "coordinator":
            return _find(cluster, lambda process: process.name() == "coordinator")
        case "fork server":
            return _find(cluster, _is_fork_server)
        case "child":
            return _find(cluster, lambda process: process.name() == "workers.child")
        case _:
            pids = [node.process_id for node in cluster.nodes() if node.member == victim and node.job]
    return psutil.Process(pids[0]) if pids and psutil.pid_exists(pids[0]) else None


def _is_fork_server(process: psutil.Process) -> bool:
    """What it forks has the same command line."""
    parent = process.parent()
    asked = "nodes.launch.fork_server" in process.cmdline()
    return asked and parent is not None and "nodes.launch.fork_server" not in parent.cmdline()


def _find(cluster: RunningCluster, is_meant: Callable[[psutil.Process], bool]) -> psutil.Process | None:
    for process in cluster.surroundings.processes():
        with contextlib.suppress(psutil.Error):
            if is_meant(process):
                return process
    return None
