"""`python -m workers --management host:port`: an input worker."""

import os
import sys
from collections.abc import Sequence

from wsc.v1 import node_pb2


def main(argv: Sequence[str] | None = None) -> int:
    # For the input_fn's process: an OpenMP thread must never spin beside other processes; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from nodes.lifecycle.node import parse_arguments, run_node
    from workers.worker_job import WorkerJob

    return run_node(node_pb2.ROLE_WORKER, parse_arguments("workers", argv), WorkerJob)


if __name__ == "__main__":
    sys.exit(main())
