"""The fork server of one process, for what it starts: where it was started by hand, or in a container of its own."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence

from interconnect.security.own_tokens import without_tokens
from nodes.launch.descriptors import readable
from nodes.launch.fork_server_process import ForkServerProcess
from nodes.launch.process import SOCKET_VARIABLE

END_SECONDS = 1.0  # between the end of a fork server's socket and that of its process

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_own: ForkServerProcess | None = None


@contextlib.contextmanager
def own_fork_server(preload: Sequence[str]) -> Iterator[None]:
    """Have what this process starts in the block forked by a server of its own, unless a launcher has one already.

    It imports `preload` from now on, beside what this process does. Where it dies, what it forked dies with it, and the
    next process that is asked for starts another. It ends with this process, once nothing is left that outlives that.
    """
    global _own
    if os.environ.get(SOCKET_VARIABLE):
        yield
        return
    _own = ForkServerProcess(preload, without_tokens(os.environ), own=True)
    try:
        yield
    finally:
        with _lock:
            ended, _own = _own, None
        ended.close()


def own_name() -> str:
    """The name of this process's own fork server, which runs; empty if it has none. Raises OSError: none can start."""
    with _lock:
        if _own is None:
            return ""
        if _own.poll() is not None:
            logger.warning("%s; another takes its place", _own.end())
            _own.restart()
        return _own.name


def own_ends_now() -> bool:
    """Whether this process's own fork server is about to end, or has: whoever asked it for something asks again."""
    with _lock:
        return _own is not None and bool(readable([_own], END_SECONDS))
