"""The rights that the process of an input_fn gives up before it reads the first byte from the user.

Of what it inherited it keeps only the descriptors to the worker: no token, and no connection to the fork server. It may
also become another user. docs/security.md describes the protection and its limits.
"""

import ctypes
import os
import pwd
import resource
import signal
from collections.abc import Sequence
from typing import Final

DROPPED_VARIABLES: Final = (
    "WAFERBOX_FORK_SERVER",
    "WAFERBOX_INPUT_USER",
    "WAFERBOX_SECRET_FILE",
    "WAFERBOX_TLS_DIR",
    "WAFERBOX_TOKEN",
    "WAFERBOX_TOKEN_FILE",
)
MAX_DESCRIPTORS: Final = 65_536

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_libc: Final = ctypes.CDLL(None, use_errno=True)


def confine(descriptors: Sequence[int], user: str) -> None:
    """Closes all descriptors but these and the standard ones, and becomes another user.

    Args:
        descriptors: the descriptors to keep.
        user: the name of the user; empty: no change.

    Raises:
        KeyError: there is no such user.
        OSError: this process may not become that user.
    """
    for name in DROPPED_VARIABLES:
        os.environ.pop(name, None)
    _close_others({0, 1, 2, *descriptors})
    # A core dump would show the memory of the fork server, of which this process has a copy.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = min(MAX_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _set(_PR_SET_NO_NEW_PRIVS, 1)
    if user:
        _become(user)


def _close_others(kept: set[int]) -> None:
    first = 0
    for descriptor in sorted(kept):
        if first < descriptor:  # closerange(0, 0) would close every descriptor.
            os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _become(user: str) -> None:
    entry = pwd.getpwnam(user)
    parent = os.getppid()
    os.setgroups([entry.pw_gid])
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    os.environ.update(HOME=entry.pw_dir, USER=user, LOGNAME=user)
    _set(_PR_SET_PDEATHSIG, signal.SIGKILL)  # again, since the kernel clears it when the user changes
    if os.getppid() != parent:
        os._exit(1)


def _set(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
