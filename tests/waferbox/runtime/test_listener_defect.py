"""A node that can take no links any more ends: it is of no use, and its coordinator hears of it."""

import socket

import pytest
from role_rig import FakeManagement

from swarmx.swarmx_program import SwarmXJob
from waferbox import roles
from waferbox.links import accept_loop
from waferbox.runtime.node import Node, NodeSettings


@pytest.mark.defects
def test_a_node_whose_listener_has_a_defect_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(hello: bytes) -> str:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(accept_loop, "proof_of", fail)
    management = FakeManagement()
    node = Node(roles.SWARMX, NodeSettings(management=management.address), SwarmXJob)
    node.start()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.connect(f"\0{node.listener.endpoint().socket}")
            caller.send(b"hello")
            node.wait()
        assert "ZeroDivisionError: a defect" in node.refusal
    finally:
        node.close()
        management.close()
