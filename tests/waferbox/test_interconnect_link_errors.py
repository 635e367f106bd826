"""What links do with peers that die, and with frames that nobody in his senses would send."""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from link_pairs import DEADLINE_SECONDS, LANES, End, connect, filled, listening

from waferbox import deadlines
from waferbox.links import grpc_lane
from waferbox.links import link as link_module
from waferbox.links.frame import Frame, FrameKind
from waferbox.links.grpc_bounds import CHUNK_BYTES, MAX_QUEUED_BYTES
from waferbox.links.hub import Hub
from waferbox.links.link import UNEXPECTED_BYTES, Link, LinkLost
from waferbox.links.listener import LinkListener
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.links.socket_lane import SocketLink

PEER = """
import json, sys, time
from waferbox.links.hub import Hub
from waferbox.links.dialling import dial
from waferbox.links.shared_memory import SharedMemory, Slice
from wsc.v1 import node_pb2
setting = json.loads(sys.argv[1])
link = dial(node_pb2.LinkEndpoint(**setting["endpoint"]), "token", name="test", own_name="peer",
            lane=setting["lane"], deadline_seconds=10)
hub = Hub()
hub.add(link)
hub.send(link, 1, 1, Slice(SharedMemory.create(100000), 0, 100000))
hub.receive(link, 2, 1)
"""


@pytest.fixture(scope="module")
def listener() -> Iterator[LinkListener]:
    with listening() as listener:
        yield listener


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Link, Hub]]:
    """A socket that says whatever it likes, and the link at its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link, hub = SocketLink("peer", theirs), Hub()
    hub.add(link)
    yield ours, link, hub
    ours.close()
    link.close()
    hub.close()


@pytest.mark.cluster
@pytest.mark.parametrize("lane", LANES)
def test_a_killed_peer_is_noticed_at_once(listener: LinkListener, lane: str) -> None:
    endpoint = listener.endpoint()
    pending = listener.expect("token", "peer")
    setting = {
        "endpoint": {"address": endpoint.address, "host": endpoint.host, "socket": endpoint.socket},
        "lane": LANES[lane],
    }
    with subprocess.Popen([sys.executable, "-c", PEER, json.dumps(setting)]) as process:
        link, hub = pending.wait(20), Hub()
        hub.add(link)
        assert hub.receive(link, 1, 1).nbytes == 100000
        process.kill()
        process.wait()
        killed = time.monotonic()
        with pytest.raises(LinkLost, match="the link to peer is lost: the process is gone") as caught:
            hub.receive(link, 1, 2)
        assert caught.value.peer == "peer"
        with pytest.raises(LinkLost):
            hub.wait()
        with pytest.raises(LinkLost):
            hub.send(link, 1, 1, filled(100))
        assert time.monotonic() - killed < 2
        link.close()
        assert time.monotonic() - killed < 3
        hub.close()


@pytest.mark.parametrize("lane", LANES)
def test_groups_of_another_size_are_refused(listener: LinkListener, lane: str) -> None:
    a, b = connect(listener, lane)
    b.link.expect({1: 100})
    a.hub.send(a.link, 1, 1, filled(100))
    b.hub.receive(b.link, 1, 1)
    a.hub.send(a.link, 1, 2, filled(101))
    with pytest.raises(LinkLost, match="group 1 with 101 bytes, which is not expected"):
        b.hub.receive(b.link, 1, 2)
    a.close()
    b.close()


@pytest.mark.parametrize("lane", LANES)
def test_a_group_that_nobody_expects_is_refused(listener: LinkListener, lane: str) -> None:
    a, b = connect(listener, lane)
    b.link.expect({1: 100})
    a.hub.send(a.link, 2, 1, filled(100))
    with pytest.raises(LinkLost, match="group 2"):
        b.hub.wait()
    a.close()
    b.close()


def send(raw_socket: socket.socket, frame: Frame, payload: bytes = b"", descriptors: tuple[int, ...] = ()) -> None:
    socket.send_fds(raw_socket, [frame.header(payload), payload], list(descriptors))


CHUNK = b"x" * 100
HOSTILE = {
    "a total beyond the cap": [Frame(FrameKind.BYTES, 1, 0, 1, 0, 100, UNEXPECTED_BYTES + 1)],
    "a length that is not its": [Frame(FrameKind.BYTES, 1, 0, 1, 0, 99, 99)],
    "a chunk outside its group": [Frame(FrameKind.BYTES, 1, 0, 1, 2**63, 100, 150)],
    "a chunk left out": [Frame(FrameKind.BYTES, 1, 0, 1, 0, 100, 300), Frame(FrameKind.BYTES, 1, 0, 1, 200, 100, 300)],
    "chunks of two groups": [
        Frame(FrameKind.COPY, 1, 0, 1, 0, 100, 300),
        Frame(FrameKind.COPY, 1, 0, 1, 100, 100, 400),
    ],
    "a memory that was not shared": [Frame(FrameKind.REFERENCE, 1, 5, 1, 0, 100, 100)],
    "a memory without a descriptor": [Frame(FrameKind.SHARE, memory=1, length=4096)],
    "a greeting in the middle": [Frame(FrameKind.HELLO)],
}


@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE)
def test_senseless_frames_end_the_link(raw: tuple[socket.socket, Link, Hub], frames: list[Frame]) -> None:
    peer, _, hub = raw
    for frame in frames:
        send(peer, frame, CHUNK if frame.kind in (FrameKind.BYTES, FrameKind.COPY) else b"")
    with pytest.raises(LinkLost, match="the link to peer is lost"):
        hub.wait()


@pytest.mark.parametrize("offset", [0, 1, 2**63, 2**64 - 1])
def test_a_reference_beyond_its_segment_is_refused(raw: tuple[socket.socket, Link, Hub], offset: int) -> None:
    peer, _, hub = raw
    memory = SharedMemory.create(4096)
    send(peer, Frame(FrameKind.SHARE, memory=1, length=4096), descriptors=(memory.fileno(),))
    send(peer, Frame(FrameKind.REFERENCE, 1, 1, 1, offset, 4096 + (offset == 0), 4096))
    with pytest.raises(LinkLost, match="lies in no memory"):
        hub.wait()
    memory.close()


def test_a_segment_said_to_be_larger_than_it_is_is_refused(raw: tuple[socket.socket, Link, Hub]) -> None:
    peer, _, hub = raw
    memory = SharedMemory.create(4096)
    send(peer, Frame(FrameKind.SHARE, memory=1, length=2**40), descriptors=(memory.fileno(),))
    with pytest.raises(LinkLost, match="4096 bytes"):
        hub.wait()
    memory.close()


def test_descriptors_that_nobody_wants_are_closed(raw: tuple[socket.socket, Link, Hub]) -> None:
    peer, link, hub = raw
    before = len(os.listdir("/proc/self/fd"))
    reader, writer = os.pipe()
    send(peer, Frame(FrameKind.ACK, step=1), descriptors=(writer,))
    with pytest.raises(LinkLost, match="may not share"):
        hub.wait()
    send(peer, Frame(FrameKind.SHARE, memory=1, length=1), descriptors=(writer, writer))
    os.close(writer)
    with pytest.raises(LinkLost):
        hub.wait()
    assert os.read(reader, 1) == b"", "an end of file: nobody holds the writing end"
    os.close(reader)
    assert len(os.listdir("/proc/self/fd")) == before
    assert link.acked_step == 0


@pytest.mark.parametrize(
    "data",
    [b"short", bytes(64), b"x" * 200_000, Frame(FrameKind.ACK).header() + b"more"],
    ids=["short", "zeros", "too large", "something behind"],
)
def test_foreign_bytes_end_the_link(raw: tuple[socket.socket, Link, Hub], data: bytes) -> None:
    peer, _, hub = raw
    peer.send(data)
    with pytest.raises(LinkLost):
        hub.wait()


def test_a_damaged_payload_is_noticed(raw: tuple[socket.socket, Link, Hub]) -> None:
    peer, _, hub = raw
    peer.send(Frame(FrameKind.BYTES, 1, 0, 1, 0, 4, 4).header(b"good") + b"evil")
    with pytest.raises(LinkLost, match="checksum of a frame's payload"):
        hub.wait()


def test_what_closes_a_link_leaves_no_descriptor(listener: LinkListener) -> None:
    for lane in LANES:
        for end in connect(listener, lane):  # whatever is made once
            end.close()
    before = len(os.listdir("/proc/self/fd"))
    payload = filled(100_000)
    for lane in LANES:
        for _ in range(5):
            a, b = connect(listener, lane)
            a.hub.send(a.link, 1, 1, Slice(payload.memory, 0, 100_000))
            b.hub.receive(b.link, 1, 1)
            a.close()
            a.close()
            b.close()
    payload.memory.close()
    deadline = time.monotonic() + DEADLINE_SECONDS  # gRPC closes its sockets in its own time
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("lane", LANES)
def test_a_peer_that_ignores_its_windows_ends_the_link(
    listener: LinkListener, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MIN_HELD_BYTES", 4_000_000)
    a, b = connect(listener, lane)
    b.link.expect({1: 1_000_000, 2: 0}, steps=3)
    sender = threading.Thread(target=_send_until_lost, args=(a,))
    sender.start()
    with pytest.raises(LinkLost, match="the link to dialler is lost: it sent more than its windows allow"):
        b.hub.receive(b.link, 2, 1)  # which never comes
    assert 3 <= len(b.link.inbox) <= 4
    b.close()
    sender.join()
    a.close()


def _send_until_lost(end: End) -> None:
    payload = filled(1_000_000)
    with contextlib.suppress(LinkLost):
        for step in itertools.count(1):
            end.hub.send(end.link, 1, step, payload, as_bytes=True)


def test_messages_that_are_taken_make_room(listener: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MIN_HELD_BYTES", 0)
    a, b = connect(listener, "grpc")
    b.link.expect({1: 100_000}, steps=2)
    payload = filled(100_000)
    for step in range(1, 10):
        a.hub.send(a.link, 1, step, payload)
        b.hub.receive(b.link, 1, step)
    a.close()
    b.close()


def test_a_link_that_is_not_read_holds_no_more_than_its_queue(
    listener: LinkListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit waits at the peer, and comes in order when the receiver looks at the link again."""
    monkeypatch.setattr(grpc_lane, "MIN_INCOMING_BYTES", 2 * CHUNK_BYTES)
    a, b = connect(listener, "grpc")
    assert isinstance(b.link, grpc_lane.GrpcLink)
    b.link.expect({1: CHUNK_BYTES // 8})
    steps = 8 * (2 * MAX_QUEUED_BYTES + 8 * CHUNK_BYTES) // CHUNK_BYTES
    sender = threading.Thread(target=_send_steps, args=(a, steps, filled(CHUNK_BYTES // 8)))
    sender.start()
    sender.join(0.5)
    assert sender.is_alive(), "nothing has stopped the peer"
    assert sum(map(len, b.link._incoming)) <= 3 * CHUNK_BYTES
    for step in range(1, steps + 1):
        b.hub.receive(b.link, 1, step)
    sender.join(DEADLINE_SECONDS)
    assert not sender.is_alive()
    a.close()
    b.close()


def test_a_link_whose_queue_is_full_closes(listener: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_lane, "MIN_INCOMING_BYTES", 0)
    a, b = connect(listener, "grpc")
    assert isinstance(b.link, grpc_lane.GrpcLink)
    for step in range(1, 4):
        a.hub.send(a.link, 1, step, filled(CHUNK_BYTES))
    while not b.link._reader_waits:
        time.sleep(0.01)
    begin = time.monotonic()
    b.close()
    assert time.monotonic() - begin < 2 * deadlines.LINKS.close
    a.close()


def _send_steps(end: End, steps: int, payload: Slice) -> None:
    for step in range(1, steps + 1):
        end.hub.send(end.link, 1, step, payload)
