"""A program for tests of the ways to start a process: it reports about itself, waits, or ends, by its arguments."""

import socket
import time
from pathlib import Path

from waferbox.launch.spawn import Child, spawn

PROBE = """
import json, os, signal, sys, threading

def main(argv):
    kind, fd = argv[0], 3
    if kind == "report":
        answer = {"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "argv": argv,
                  "fds": sorted(int(name) for name in os.listdir("/proc/self/fd")), "stdin": sys.stdin.read(),
                  "ignored": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "preloaded": "colorsys" in sys.modules}
        os.write(fd, json.dumps(answer).encode())
    elif kind == "second":
        os.write(4, b"second")
        os.write(3, b"first")
    elif kind == "status":
        return int(argv[1])
    elif kind == "raise":
        raise RuntimeError("what it is")
    elif kind == "stay":
        os.write(fd, b"here")
        signal.pause()
    elif kind == "telling":
        signal.signal(signal.SIGTERM, lambda number, frame: os.write(fd, b"SIGTERM"))
        os.write(fd, b"here")
        while True:
            signal.pause()
    elif kind == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(fd, b"here")
        while True:
            signal.pause()
    return 0
"""


def run(arguments: list[str], ends: int = 1, *, outlives: bool = False) -> tuple[Child, list[socket.socket]]:
    """Starts the probe; returns its process, and the other ends of its descriptors."""
    pairs = [socket.socketpair() for _ in range(ends)]
    child = spawn("swarmx", arguments, [theirs.fileno() for _, theirs in pairs], outlives=outlives)
    for ours, theirs in pairs:
        theirs.close()
        ours.settimeout(20)
    return child, [ours for ours, _ in pairs]


def gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
