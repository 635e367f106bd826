"""A hook in the processes of a cluster, which injects the faults that a test has ordered at named moments.

PROCESS_HOOK names this file (benchmarks/process_hooks/), and CHAOS_ORDERS a folder. An order is a file "<number>.order"
there, a JSON object with the member, the moment, "at", the first epoch in which it counts, and the action. "at" is the
least number of the step or, for other moments, of the moment's occurrence in the job. The actions are "kill", "stop"
(the test sends SIGCONT), "hang" (one thread), "freeze" (all threads), "lose" (the next group that it sends to another
member), "memory" (an allocation fails), "full" (the disk), and "damage" and "shorten" (the recovery point). The process
first writes "<number>.done", with its id and the time.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOMENTS = (
    "attach",
    "load",
    "loaded",
    "start",
    "step",
    "stop",
    "load again",  # this moment and the next four: in an epoch after a death
    "loaded again",
    "start again",
    "step again",
    "stop again",
)
SPARE_BYTES = 1 << 28  # the memory that a process can still allocate before one fails
COORDINATORS_MOMENTS = ("epoch", "loaded epoch", "stop epoch", "record", "complete point")
KEEPERS_MOMENTS = ("keep", "open point", "write point", "complete point", "put back", "snapshot")


class Hook:
    """The state of the hook in one process: the member of a job that the process is, and its moments so far."""

    def __init__(self, orders: Path) -> None:
        self._orders = orders
        self.member = ""
        self.again = ""  # " again" in later epochs
        self.epoch = 0  # the epoch that was loaded last
        self.loses = False  # whether the next group is lost
        self._counts: Counter[str] = Counter()

    def attached(self, member: str) -> None:
        """Resets the hook at the begin of a job."""
        self.member, self.again, self.epoch = member, "", 0
        self._counts.clear()
        self.reached("attach")

    def reached(self, moment: str, at: int = 0, path: Path | None = None) -> None:
        """Injects the faults ordered for a moment. Raises OSError for a full disk."""
        self._counts[moment] += 1
        at = at or self._counts[moment]
        for order in sorted(self._orders.glob("*.order")):
            try:
                wanted = json.loads(order.read_text())
            except FileNotFoundError:
                continue  # Another process has taken the order.
            is_meant = (wanted["member"], wanted["moment"]) == (self.member, moment)
            if is_meant and at >= wanted["at"] and self.epoch >= wanted["epoch"]:
                try:
                    order.rename(order.with_suffix(".taken"))
                except FileNotFoundError:
                    continue
                self._obey(order, wanted["action"], path)

    def _obey(self, order: Path, action: str, path: Path | None) -> None:
        partial = order.with_suffix(".partial")
        partial.write_text(json.dumps({"pid": os.getpid(), "time": time.time()}))
        partial.rename(order.with_suffix(".done"))
        match action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                threading.Event().wait()
            case "freeze":
                ctypes.PyDLL(None).pause()  # PyDLL keeps the lock of the interpreter.
            case "lose":
                self.loses = True
            case "memory":
                refuse_memory()
            case "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "damage":
                assert path is not None
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
            case "shorten":
                assert path is not None
                os.truncate(path, path.stat().st_size // 2)


def refuse_memory() -> None:
    """Raises torch's error for an allocation beyond the limit of the process."""
    import torch

    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, ((pages << 12) + SPARE_BYTES, limits[1]))
    try:
        torch.empty(2 * SPARE_BYTES, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def before(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Makes each call of a method call `call` with the same arguments first."""
    method = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        call(*arguments)
        return method(*arguments, **named)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, call: Callable[..., None]) -> None:
    method = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        call(*arguments)
        return result

    setattr(owner, name, wrapped)


def install(module: str) -> None:
    """Installs the hook; called once in each process, before anything else."""
    hook = Hook(Path(os.environ["CHAOS_ORDERS"]))
    if module == "appliance.coordinator":
        hook.member = "coordinator"
        _watch_coordinator(hook)
    if module not in ("memoryx", "swarmx", "wafer", "workers"):
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _watch_role(hook)
    if module in ("memoryx", "wafer"):
        _watch_keeper(hook)


def _watch_role(hook: Hook) -> None:
    from waferbox.links.link import Link
    from waferbox.runtime.progress import Progress
    from waferbox.runtime.role_job import RoleJob

    def attach(job: RoleJob, context: Any, *_: Any) -> None:
        hook.attached(context.node)

    def load(job: RoleJob, request: Any, *_: Any) -> None:
        hook.again, hook.epoch = " again" if request.epoch > 1 else "", request.epoch
        hook.reached("load" + hook.again)

    before(RoleJob, "__init__", attach)
    before(RoleJob, "load", load)
    after(RoleJob, "load", lambda *_: hook.reached("loaded" + hook.again))
    before(RoleJob, "start", lambda *_: hook.reached("start" + hook.again))
    before(RoleJob, "stop", lambda *_: hook.reached("stop" + hook.again))
    step: Any = Progress.__dict__["step"]

    def count(progress: Progress, value: int) -> None:
        step.__set__(progress, value)
        if value:
            hook.reached("step" + hook.again, value)

    patched: Any = Progress
    patched.step = property(step.__get__, count)
    post: Any = Link.post

    def lose(link: Any, *arguments: Any, **named: Any) -> None:
        if hook.loses and link.name != "coordinator":
            hook.loses = False
        else:
            post(link, *arguments, **named)

    link: Any = Link
    link.post = lose


def _watch_coordinator(hook: Hook) -> None:
    from appliance.coordinator.execution.epoch import Epoch
    from appliance.coordinator.execution.recovery_points import RecoveryPoints
    from appliance.coordinator.record import JobRecord

    def load(epoch: Epoch) -> None:
        hook.epoch = epoch.number
        hook.reached("epoch")

    before(Epoch, "load", load)
    after(Epoch, "load", lambda *_: hook.reached("loaded epoch"))
    before(Epoch, "stop", lambda *_: hook.reached("stop epoch"))
    before(JobRecord, "_change", lambda *_: hook.reached("record"))
    before(RecoveryPoints, "settle", lambda *_: hook.reached("complete point"))


def _watch_keeper(hook: Hook) -> None:
    from waferbox.states.point_file import PointFile, PointWriter
    from waferbox.states.point_shares import PointShares
    from waferbox.states.store import Snapshots

    before(PointShares, "keep_due", lambda *_: hook.reached("keep"))
    before(PointWriter, "__init__", lambda *_: hook.reached("open point"))
    before(PointWriter, "write", lambda *_: hook.reached("write point"))
    before(PointWriter, "complete", lambda *_: hook.reached("complete point"))
    after(PointWriter, "complete", lambda writer: hook.reached("completed point", path=writer.path))
    before(PointFile, "read", lambda *_: hook.reached("put back"))
    before(Snapshots, "take", lambda *_: hook.reached("snapshot"))


if __name__ == "__main__":
    sys.exit("to be named by PROCESS_HOOK")
