"""A wafer, as its own process would set it up."""

from functools import partial

from wafer.wafer_job import WaferJob
from waferbox.runtime.node import Node, NodeSettings
from waferbox.states.state_service import StateService
from wsc.v1 import node_pb2


def wafer_node(settings: NodeSettings) -> Node:
    return Node(node_pb2.ROLE_WAFER, settings, partial(WaferJob, threads=1, service=StateService()))
