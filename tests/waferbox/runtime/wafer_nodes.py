"""A wafer node in this process, set up as in one of its own."""

from functools import partial

from wafer.wafer_job import WaferJob
from waferbox import roles
from waferbox.runtime.node import Node, NodeSettings
from waferbox.states.state_service import StateService


def wafer_node(settings: NodeSettings) -> Node:
    return Node(roles.WAFER, settings, partial(WaferJob, threads=1, service=StateService()))
