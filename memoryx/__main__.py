"""`python -m memoryx --management host:port`: a shard of MemoryX."""

import os
import sys
from collections.abc import Sequence

import grpc

from wsc.v1 import node_pb2, node_pb2_grpc


def main(argv: Sequence[str] | None = None) -> int:
    # An OpenMP thread must never spin beside other processes; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from interconnect.links.listener import LinkListener
    from memoryx.memoryx_job import MemoryXJob
    from memoryx.settings import parse_arguments
    from memoryx.state_service import StateService
    from nodes.lifecycle.node import run_node

    settings, state_settings = parse_arguments(argv)
    torch.set_num_threads(settings.threads)
    service = StateService()

    def add_services(server: grpc.Server, listener: LinkListener) -> None:
        service.listen_with(listener)
        node_pb2_grpc.add_StateServiceServicer_to_server(service, server)

    return run_node(
        node_pb2.ROLE_MEMORYX,
        settings,
        lambda context: MemoryXJob(context, service, state_settings),
        add_services=add_services,
    )


if __name__ == "__main__":
    sys.exit(main())
