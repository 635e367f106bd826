"""The command on a terminal."""

import os
import pty
import sys


def on_terminal(*arguments: str, until: str) -> tuple[int, str]:
    """Runs the command on a terminal of 80 columns, and sends Ctrl-C after the text `until`.

    Returns the exit status and the output.
    """
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
