"""What the process of an input_fn gives up before it reads a byte of what the user sent.

It keeps its descriptors to the worker and nothing else that was inherited, no token and no way to the fork server; and
it may be another user's from here on. docs/security.md says what that protects from, and what it does not.
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
    """Keep these descriptors and the standard ones; become the user of this name, if one is named.

    Raises OSError, KeyError: there is no such user, or this process may not become it.
    """
    for name in DROPPED_VARIABLES:
        os.environ.pop(name, None)
    _close_others({0, 1, 2, *descriptors})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what the fork server had in memory is in ours
    most = min(MAX_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _set(_PR_SET_NO_NEW_PRIVS, 1)
    if user:
        _become(user)


def _close_others(kept: set[int]) -> None:
    first = 0
    for descriptor in sorted(kept):
        if first < descriptor:  # an empty range would be taken for all
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
    _set(_PR_SET_PDEATHSIG, signal.SIGKILL)  # which the kernel forgets when the user changes
    if os.getppid() != parent:
        os._exit(1)


def _set(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
