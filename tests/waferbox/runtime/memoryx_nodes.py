"""A MemoryX node in this process, set up as in one of its own."""

from memoryx.memoryx_program import MemoryXJob
from waferbox import roles
from waferbox.runtime.node import Node, NodeSettings
from waferbox.states.state_memory import StateSettings
from waferbox.states.state_service import StateService


def memoryx_node(management: str, states: StateSettings) -> Node:
    service = StateService()
    return Node(
        roles.MEMORYX,
        NodeSettings(management=management),
        lambda context: MemoryXJob(context, service, states),
        add_services=service.add_to,
    )
