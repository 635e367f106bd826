"""How a process of the cluster begins: tied to a parent's life, alone in its session, with its descriptors in order.

Both ways of starting one end here: the fork server (waferbox.launch.fork_server), and, where none runs,
`python -m waferbox.launch.process [--parent PID] [--fds 7,9] MODULE [ARGUMENT ...]`.
"""

import argparse
import contextlib
import ctypes
import fcntl
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from waferbox.roles import ROLES

INPUT_PROCESS = "waferbox.input_process"

# The modules that may be started: packages by their __main__, plain modules by themselves. Each has main(argv) -> int.
MODULES = frozenset({INPUT_PROCESS, *(role.module for role in ROLES)})

# A user's modules may have the names of these packages.
_ROLE_PACKAGES = frozenset({"vendor_wire", *(role.module.partition(".")[0] for role in ROLES)})

FIRST_FD = 3  # the descriptors handed to a process are 3, 4, ... there, in the order in which they were given

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exits at once if the parent has died already."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def enter(*, parent: int | None, fds: Sequence[int]) -> None:
    """Make the calling process, fresh from fork or exec, one that heeds no terminal and dies with its parent.

    parent: None for a process that outlives whoever started it. Raises OSError where a descriptor is not open.
    Descriptors are moved to FIRST_FD and up; standard input is empty.
    """
    if parent is not None:
        die_with_parent(parent)
    if os.getsid(0) != os.getpid():
        os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    empty = os.open(os.devnull, os.O_RDONLY)
    if empty != 0:
        os.dup2(empty, 0)
        os.close(empty)
    # Out of the way of the numbers that are wanted first, then into place.
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD + len(fds)) for fd in fds]
    for fd in fds:
        os.close(fd)
    for target, source in enumerate(aside, FIRST_FD):
        os.dup2(source, target, inheritable=False)
        os.close(source)


def run_module(module: str, argv: Sequence[str]) -> int:
    """Run main(argv) of one of MODULES; what it raises is printed and gives the exit status that Python would give."""
    if module not in MODULES:
        raise ValueError(f"{module!r} is not one of the modules that may be started: {', '.join(sorted(MODULES))}")
    _libc.prctl(_PR_SET_NAME, module.rpartition(".")[2].encode()[:15], 0, 0, 0)  # what ps and top show
    sys.argv = [module, *argv]
    if module == INPUT_PROCESS:
        _forget_roles()
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            module += ".__main__"
        return int(importlib.import_module(module).main(list(argv)))
    except SystemExit as exit_request:
        if exit_request.code is None or isinstance(exit_request.code, int):
            return exit_request.code or 0
        print(exit_request.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # noqa: BLE001 - the last frame of a process: report, as the interpreter would
        traceback.print_exc()
        return 1


def _forget_roles() -> None:
    """Remove the packages of the roles from this process, which is about to run a user's code."""
    for name in list(sys.modules):
        if name.partition(".")[0] in _ROLE_PACKAGES:
            del sys.modules[name]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="waferbox.launch.process")
    parser.add_argument("--parent", type=int)
    parser.add_argument("--fds", default="")
    parser.add_argument("module", choices=sorted(MODULES))
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    enter(parent=options.parent, fds=[int(fd) for fd in options.fds.split(",") if fd])
    return run_module(options.module, options.arguments)


# --- How the kernel shares the cores between the roles of one host ----------------------------------------------------


def let_wafers_compute() -> None:
    """Have this thread, and those that it starts, take a core from no other when they are woken: they wait for one.

    For all roles but wafers, which wake them with each group that they send.
    """
    with contextlib.suppress(OSError):  # where a container forbids it, steps are slower
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    sys.exit(main())
