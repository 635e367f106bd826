"""The command on a terminal."""

import os
import pty
import sys


def on_terminal(*arguments: str, until: str) -> tuple[int, str]:
    """The exit status and what a terminal of 80 columns was sent, with Ctrl-C once it has been sent the text."""
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        os.execve(sys.executable, [sys.executable, "-m", "waferbox", *arguments], environment)
    sent, interrupted = b"", False
    with open(terminal, "rb", buffering=0) as screen:
        while True:
            try:
                sent += screen.read(1000)
            except OSError:  # the end of its last process
                break
            if until.encode() in sent and not interrupted:
                interrupted = True
                os.write(terminal, b"\x03")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), sent.decode()
