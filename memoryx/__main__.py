"""`python -m memoryx --management host:port`: a shard of MemoryX."""

import os
import sys
from collections.abc import Sequence

from wsc.v1 import node_pb2


def main(argv: Sequence[str] | None = None) -> int:
    # An OpenMP thread must never spin beside other processes; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from memoryx.memoryx_job import MemoryXJob
    from memoryx.recovery.folders import sweep
    from memoryx.settings import parse_arguments
    from memoryx.state_service import StateService
    from nodes.folders import recovery_root
    from nodes.lifecycle.node import run_node

    settings, state_settings = parse_arguments(argv)
    torch.set_num_threads(settings.threads)
    sweep(recovery_root())
    service = StateService()

    return run_node(
        node_pb2.ROLE_MEMORYX,
        settings,
        lambda context: MemoryXJob(context, service, state_settings),
        add_services=service.add_to,
    )


if __name__ == "__main__":
    sys.exit(main())
