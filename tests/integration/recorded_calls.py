"""The recorded conversation of an unmodified client of the vendor's, said again to a gateway.

Names that the gateway made then are replaced by those that it makes now, as they are of the same length.
"""

import base64
import gzip
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from vendor_wire import management_pb2

RECORDED = Path(__file__).parent / "vendor" / "conversation.json.gz"
# Calls of threads of their own, which last for as long as there is anything to hear.
POLLS = ("HeartbeatV2", "UnaryMonitorError", "UnaryMsgQueue")
# What the gateway makes up: jobs and artifacts.
MADE = re.compile(rb"wsjob-[0-9a-f]{16}|(?<=/cached_compile/)[0-9a-f]+")
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
CALL_SECONDS = 60.0
CANCELLED = management_pb2.JOB_STATUS_CANCELLED


@dataclass(frozen=True, kw_only=True)
class Call:
    """One that was recorded."""

    method: str
    authority: str
    metadata: list[tuple[str, str]]
    requests: list[bytes]
    responses: list[bytes]

    @property
    def name(self) -> str:
        return self.method.rpartition("/")[2]


def recorded() -> list[Call]:
    """The calls in their order, but for those that poll."""
    with gzip.open(RECORDED, "rt") as file:
        calls: list[dict[str, Any]] = json.load(file)
    found = [
        Call(
            method=call["method"],
            authority=call["authority"],
            metadata=[(key, value) for key, value in call["metadata"]],
            requests=[base64.b64decode(each) for each in call["requests"]],
            responses=[base64.b64decode(each) for each in call["responses"]],
        )
        for call in calls
    ]
    return [call for call in found if call.name not in POLLS]


class Client:
    """Says what was recorded."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._workflow = f"workflow-{secrets.token_hex(4)}"
        self._channels: dict[str, grpc.Channel] = {}
        self._names: dict[bytes, bytes] = {}  # then: now

    def say(self, call: Call) -> list[bytes]:
        """Make a call; returns the responses."""

        def requests() -> Iterator[bytes]:
            for request in call.requests:
                yield self._now(request)

        stub = self._channel(self.now(call.authority)).stream_stream(call.method, None, None)
        metadata = tuple((key, self._workflow if key == "workflow-id" else value) for key, value in call.metadata)
        responses = list(stub(requests(), metadata=metadata, timeout=CALL_SECONDS))
        assert len(responses) == len(call.responses), call.name
        for then, now in zip(call.responses, responses, strict=True):
            self._names |= dict(zip(MADE.findall(then), MADE.findall(now), strict=True))
        return responses

    def now(self, name: str) -> str:
        """What a name of then is now."""
        return self._now(name.encode()).decode()

    def stream(self, method: str, requests: Iterator[bytes]) -> Any:
        """A call of any kind; returns it."""
        return self._channel("").stream_stream(method, None, None)(requests)

    def _now(self, text: bytes) -> bytes:
        return MADE.sub(lambda found: self._names.get(found[0], found[0]), text)

    def _channel(self, authority: str) -> grpc.Channel:
        if authority not in self._channels:
            options = [*UNLIMITED, *([("grpc.default_authority", authority)] if authority else [])]
            self._channels[authority] = grpc.insecure_channel(self._address, options=options)
        return self._channels[authority]

    def cancel(self) -> None:
        """Cancel all jobs."""
        for name in {name for name in self._names.values() if name.startswith(b"wsjob-")}:
            request = management_pb2.CancelJobRequest(job_id=name.decode(), job_status=CANCELLED)
            method = "/cluster.cluster_mgmt_pb.ClusterManagement/CancelJobV2"
            list(self.stream(method, iter([request.SerializeToString()])))

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
