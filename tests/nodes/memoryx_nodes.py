"""MemoryX, as its own process would set it up."""

import grpc

from interconnect.links.listener import LinkListener
from memoryx.files.state_memory import StateSettings
from memoryx.memoryx_job import MemoryXJob
from memoryx.state_service import StateService
from nodes.lifecycle.node import Node, NodeSettings
from wsc.v1 import node_pb2, node_pb2_grpc


def memoryx_node(management: str, states: StateSettings) -> Node:
    service = StateService()

    def add_services(server: grpc.Server, listener: LinkListener) -> None:
        service.listen_with(listener)
        node_pb2_grpc.add_StateServiceServicer_to_server(service, server)

    return Node(
        node_pb2.ROLE_MEMORYX,
        NodeSettings(management=management),
        lambda context: MemoryXJob(context, service, states),
        add_services=add_services,
    )
