"""Two ends of a link in one process, for the tests of links and hubs."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from waferbox.links.dialling import dial
from waferbox.links.hub import Hub
from waferbox.links.link import Link
from waferbox.links.listener import LinkListener
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.rpc.server import make_server
from wsc.v1 import node_pb2

DEADLINE_SECONDS = 10.0
LANES = {"socket": node_pb2.LANE_SHARED_MEMORY, "grpc": node_pb2.LANE_GRPC}
_tokens = itertools.count()


@dataclass
class End:
    """One end of a link, and the hub that it is in."""

    link: Link
    hub: Hub

    def close(self) -> None:
        self.link.close()
        self.hub.close()


def raise_defect(defect: Exception) -> None:
    """Fails the test; for a listener that must have no defect."""
    raise defect


@contextmanager
def listening() -> Iterator[LinkListener]:
    """Yields a listener that accepts links on both lanes."""
    server = make_server()
    listener = LinkListener(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", raise_defect)
    listener.add_to_server(server)
    server.start()
    try:
        yield listener
    finally:
        listener.close()
        server.stop(None).wait()


def connect(listener: LinkListener, lane: str) -> tuple[End, End]:
    """Returns the end that dialled and the one that listened, each in a hub of its own."""
    token = f"token-{next(_tokens)}"
    pending = listener.expect(token, "dialler")
    dialled = dial(
        listener.endpoint(),
        token,
        name="listener",
        own_name="dialler",
        lane=LANES[lane],
        deadline_seconds=DEADLINE_SECONDS,
    )
    ends = End(dialled, Hub()), End(pending.wait(DEADLINE_SECONDS), Hub())
    for end in ends:
        end.hub.add(end.link)
    return ends


def filled(nbytes: int, seed: int = 1) -> Slice:
    """Returns a slice, not at the start of its shared memory, with bytes that differ from offset to offset."""
    memory = SharedMemory.create(nbytes + 64)
    pattern = bytes((seed + i * 7 + (i >> 8)) & 255 for i in range(min(nbytes, 65536)))
    view = memory.buffer[64:]
    for begin in range(0, nbytes, len(pattern) or 1):
        view[begin : begin + len(pattern)] = pattern[: nbytes - begin]
    return Slice(memory, 64, nbytes)
