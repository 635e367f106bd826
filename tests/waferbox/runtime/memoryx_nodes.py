"""A MemoryX node in this process, set up as in one of its own."""

import grpc

from memoryx.memoryx_program import MemoryXJob
from waferbox import roles
from waferbox.links.listener import LinkListener
from waferbox.runtime.node import Node, NodeSettings
from waferbox.states.state_memory import StateSettings
from waferbox.states.state_service import StateService
from wsc.v1 import node_pb2_grpc


def memoryx_node(management: str, states: StateSettings) -> Node:
    service = StateService()

    def add_services(server: grpc.Server, listener: LinkListener) -> None:
        service.listen_with(listener)
        node_pb2_grpc.add_StateServiceServicer_to_server(service, server)

    return Node(
        roles.MEMORYX,
        NodeSettings(management=management),
        lambda context: MemoryXJob(context, service, states),
        add_services=add_services,
    )
