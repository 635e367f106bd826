"""`python -m workers --management host:port`: an input worker."""

import os
import sys
from collections.abc import Sequence

from wsc.v1 import node_pb2

# What an input_fn's process needs at once.
INPUT_PRELOAD = ("torch", "numpy", "cloudpickle", "workers.child.process")


def main(argv: Sequence[str] | None = None) -> int:
    # For the input_fn's process: an OpenMP thread must never spin beside other processes; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from nodes.launch.own_fork_server import own_fork_server
    from nodes.lifecycle.node import parse_arguments, run_node
    from workers.worker_job import WorkerJob

    settings = parse_arguments("workers", argv)
    with own_fork_server(INPUT_PRELOAD):
        return run_node(node_pb2.ROLE_WORKER, settings, WorkerJob)


if __name__ == "__main__":
    sys.exit(main())
