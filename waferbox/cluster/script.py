"""`waferbox run`: a script as a child process, with its exit status and our signals passed on."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FROM_KERNEL = 0x80  # si_code SI_KERNEL: the terminal sent it, to the whole foreground group, so to the script too


def run_script(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run it with this Python; returns its exit status, 128 + n if signal n ended it.

    To be called in the main thread of a process that has no other.
    """
    watched = {*FORWARDED, signal.SIGCHLD}
    process = subprocess.Popen([sys.executable, script, *arguments], env={**os.environ, **environment})
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        while process.poll() is None:
            # A timeout only in case the child's end came between poll and here, and its signal with another's.
            received = signal.sigtimedwait(watched, 1.0)
            if received is None or received.si_signo == signal.SIGCHLD:
                continue
            if received.si_code != _FROM_KERNEL:
                process.send_signal(received.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    status = process.returncode
    assert status is not None
    return status if status >= 0 else 128 - status
