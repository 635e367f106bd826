"""How the kernel shares the cores between the roles of one host."""

import contextlib
import os


def let_wafers_compute() -> None:
    """Have this thread, and those that it starts, take a core from no other when they are woken: they wait for one.

    For all roles but wafers, which wake them with each group that they send.
    """
    with contextlib.suppress(OSError):  # where a container forbids it, steps are slower
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
