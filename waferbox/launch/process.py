"""The begin of a process of the cluster: tied to a parent, in a session of its own, with its descriptors in order.

The fork server begins its children here. So does a Python of its own, where no fork server runs:

    waferbox.launch.process [--parent PID] [--fds 7,9] MODULE [ARGUMENT ...]
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

from waferbox.host.process_limits import thread_shortage
from waferbox.launch.installation import begin_user_code
from waferbox.roles import ROLES

INPUT_PROCESS = "waferbox.input_process"

# Modules that may be started: a package by its __main__, a plain module by itself. Each has main(argv) -> int.
MODULES = frozenset({INPUT_PROCESS, *(role.module for role in ROLES)})

# A user's modules may have the names of these packages.
_ROLE_PACKAGES = frozenset({"vendor_wire", *(role.module.partition(".")[0] for role in ROLES)})

FIRST_FD = 3  # the descriptors that a process is given are 3, 4, ... there, in the order of the request

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies; exits at once if the parent is dead."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def enter(*, parent: int | None, fds: Sequence[int]) -> None:
    """Detaches this process, new from fork or exec, from terminals and orders its descriptors.

    Standard input is empty afterwards.

    Args:
        parent: the process with which this one dies; None for one that outlives its starter.
        fds: descriptors, which are moved to FIRST_FD and up.

    Raises:
        OSError: a descriptor is not open.
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
    # First above all target numbers: a target may be the number of a descriptor that is still to be moved.
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD + len(fds)) for fd in fds]
    for fd in fds:
        os.close(fd)
    for target, source in enumerate(aside, FIRST_FD):
        os.dup2(source, target, inheritable=False)
        os.close(source)


def run_module(module: str, argv: Sequence[str]) -> int:
    """Runs main(argv) of one of MODULES, and returns the exit status. Exceptions are printed, as Python does."""
    if module not in MODULES:
        raise ValueError(f"{module!r} is not one of the modules that may be started: {', '.join(sorted(MODULES))}")
    _libc.prctl(_PR_SET_NAME, module.rpartition(".")[2].encode()[:15], 0, 0, 0)  # shown by ps and top
    sys.argv = [module, *argv]
    if module == INPUT_PROCESS:
        begin_user_code(_ROLE_PACKAGES)
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
    except Exception as error:  # noqa: BLE001 - the last frame of a process: report, as the interpreter would
        if shortage := thread_shortage(error):
            print(f"{module.removesuffix('.__main__')}: {shortage}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="waferbox.launch.process")
    parser.add_argument("--parent", type=int)
    parser.add_argument("--fds", default="")
    parser.add_argument("module", choices=sorted(MODULES))
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    enter(parent=options.parent, fds=[int(fd) for fd in options.fds.split(",") if fd])
    return run_module(options.module, options.arguments)


def let_wafers_compute() -> None:
    """Makes this thread, and those that it starts later, wait for a free core when they are woken.

    Called by all roles but the wafers, which wake the other roles with each group that they send and would lose their
    core to them.
    """
    with contextlib.suppress(OSError):  # a container may forbid it; steps are slower then
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    sys.exit(main())
