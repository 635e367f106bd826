"""The greatest numbers that a job can ask for: clients refuse larger ones at once, and management and nodes again.

MAX_NODES is that of a cluster.
"""

from typing import Final

MAX_WAFERS: Final = 1024
MAX_WORKERS_PER_WAFER: Final = 256
MAX_NODES: Final = 1024  # of each role, in a cluster that a command, a script or a run of tests starts
MAX_RUN_AHEAD_STEPS: Final = 1 << 16
MAX_RESTARTS: Final = 1_000_000
MAX_UINT32: Final = (1 << 32) - 1  # of all other counts in messages
MAX_WAFER_GIB: Final = (1 << 34) - 1  # messages have bytes in 64 bits
