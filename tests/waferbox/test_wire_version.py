"""The version that clients and processes of a cluster compare."""

import re
from pathlib import Path

import pytest

from waferbox import __version__, wire_version
from waferbox.wire_version import PROTOCOLS, WIRE_VERSION, _fingerprint
from wsc.v1 import node_pb2, plan_pb2


def test_it_has_the_number_of_the_release_and_a_fingerprint_of_all_messages() -> None:
    assert re.fullmatch(rf"{re.escape(__version__)}\+[0-9a-f]{{8}}", WIRE_VERSION)
    protocols = Path(wire_version.__file__).parents[1] / "proto" / "wsc" / "v1"
    assert [protocol.DESCRIPTOR.name for protocol in PROTOCOLS] == sorted(
        f"wsc/v1/{path.name}" for path in protocols.glob("*.proto")
    )


def test_a_change_of_the_messages_or_of_the_revision_is_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_version, "REVISION", 0)
    other_revision = _fingerprint()
    monkeypatch.undo()
    monkeypatch.setattr(wire_version, "PROTOCOLS", [plan_pb2, node_pb2])
    assert len({WIRE_VERSION.partition("+")[2], other_revision, _fingerprint()}) == 3
