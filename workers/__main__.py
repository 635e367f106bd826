"""`python -m workers --management host:port`: an input worker."""

import os
import sys
from collections.abc import Sequence

from waferbox import roles
from waferbox.launch.installation import begin_process

# The fork server imports these, as every input_fn's process needs them at once.
INPUT_PRELOAD = ("torch", "numpy", "cloudpickle", "waferbox.input_process.__main__")


def main(argv: Sequence[str] | None = None) -> int:
    # The input_fn's process inherits this: an OpenMP thread must not spin beside other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from waferbox.launch.fork_server_process import own_fork_server
    from waferbox.runtime.node import parse_arguments, run_node
    from workers.worker_program import WorkerJob

    settings = parse_arguments(roles.WORKER, argv)
    with own_fork_server(INPUT_PRELOAD):
        return run_node(roles.WORKER, settings, WorkerJob)


if __name__ == "__main__":
    begin_process()
    sys.exit(main())
