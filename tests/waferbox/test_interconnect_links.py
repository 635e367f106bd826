"""Links and hubs, over both lanes."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from link_pairs import LANES, End, connect, filled, listening

from waferbox import deadlines
from waferbox.links import grpc_lane
from waferbox.links.frame import HEADER_BYTES, INLINE_BYTES, parse
from waferbox.links.grpc_lane import GrpcLink
from waferbox.links.hub import Hub, Stopped
from waferbox.links.link import LinkLost, Message
from waferbox.links.listener import LinkListener
from waferbox.links.shared_memory import SharedMemory, Slice

MIB = 1024 * 1024
Pair = tuple[End, End]


@pytest.fixture(scope="module")
def listener() -> Iterator[LinkListener]:
    with listening() as listener:
        yield listener


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(listener: LinkListener, lane: str) -> Iterator[Pair]:
    ends = connect(listener, lane)
    yield ends
    for end in ends:
        end.close()


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("nbytes", [0, 1, 64, INLINE_BYTES, INLINE_BYTES + 1, 3 * MIB, 9 * MIB + 5])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_group_arrives_whole(pair: Pair, lane: str, nbytes: int, as_bytes: bool) -> None:
    a, b = pair
    payload = filled(nbytes)
    thread = in_thread(lambda: a.hub.send(a.link, 7, 3, payload, as_bytes=as_bytes))
    message = b.hub.receive(b.link, 7, 3)
    thread.join()
    assert (message.group, message.step, message.nbytes) == (7, 3, nbytes)
    assert message.view == payload.view
    assert message.tensor(torch.uint8, (nbytes,), 0).sum(dtype=torch.int64) == sum(payload.view)
    by_reference = lane == "socket" and not as_bytes and nbytes > INLINE_BYTES
    assert (message.memory is not None) == by_reference
    assert (message.payload is not None) != by_reference


def test_chunks_are_messages_where_they_are_asked_for(listener: LinkListener) -> None:
    a, b = connect(listener, "grpc")
    payload = filled(3 * MIB + 5)
    b.link.expect({7: payload.nbytes, 8: payload.nbytes})
    b.link.pass_chunks({7})

    def send() -> None:
        for step in (1, 2):
            for group in (7, 8):
                a.hub.send(a.link, group, step, payload)

    thread = in_thread(send)
    messages = [b.hub.wait() for _ in range(10)]
    thread.join()
    by_chunk = [message for message in messages if message.group == 7]
    assert [(each.step, each.begin, each.is_last) for each in by_chunk] == [
        (step, begin * MIB, begin == 3) for step in (1, 2) for begin in range(4)
    ]
    assert {each.group_bytes for each in by_chunk} == {payload.nbytes}
    assert b"".join(each.view for each in by_chunk[:4]) == payload.view
    assert [message.view for message in messages if message.group == 8] == [payload.view] * 2
    a.close()
    b.close()


def test_a_group_that_is_sent_in_parts_arrives_whole(pair: Pair, lane: str) -> None:
    """And may be passed on by chunk, to links of both lanes."""
    a, b = pair
    payload = filled(3 * MIB + 5)
    ends = [0, MIB, 2 * MIB + 64, payload.nbytes]
    for begin, end in pairwise(ends):
        a.hub.send_part(a.link, 7, 1, payload, begin, end)
    message = b.hub.receive(b.link, 7, 1)
    assert (message.nbytes, message.begin, message.is_last) == (payload.nbytes, 0, True)
    assert message.view == payload.view
    assert (message.memory is not None) == (lane == "socket")


@pytest.mark.parametrize("lane", ["socket", "grpc"])
def test_chunks_that_are_passed_on_arrive_as_a_whole_group(listener: LinkListener, lane: str) -> None:
    (a, b), (c, d), (e, f) = (connect(listener, each) for each in ("grpc", "socket", lane))
    payload = filled(3 * MIB + 5)
    b.link.pass_chunks({7})
    thread = in_thread(lambda: a.hub.send(a.link, 7, 1, payload))
    is_last = False
    while not is_last:
        message = b.hub.wait()
        is_last = message.is_last
        for end in (c, e):
            end.hub.forward(end.link, message)
    thread.join()
    for end in (d, f):
        assert end.hub.receive(end.link, 7, 1).view == payload.view
    for end in (a, b, c, d, e, f):
        end.close()


@pytest.mark.parametrize("begin", [0, 2 * MIB])
def test_a_chunk_that_is_not_the_next_one_ends_the_link(listener: LinkListener, begin: int) -> None:
    a, b = connect(listener, "grpc")
    payload = filled(3 * MIB)
    b.link.pass_chunks({7})
    a.hub.send_part(a.link, 7, 1, payload, 0, MIB)
    a.hub.send_part(a.link, 7, 1, payload, begin, begin + MIB)

    def take_all() -> None:
        while True:
            assert b.hub.wait().end == MIB

    with pytest.raises(LinkLost, match="a chunk of group 7 is missing"):
        take_all()
    a.close()
    b.close()


def test_bytes_may_be_written_again_when_they_are_sent(pair: Pair) -> None:
    a, b = pair
    payload = filled(INLINE_BYTES)
    before = bytes(payload.view)
    a.hub.send(a.link, 1, 1, payload)
    payload.view[:] = bytes(INLINE_BYTES)
    assert b.hub.receive(b.link, 1, 1).view == before


def test_a_reference_shows_the_sender_s_memory(listener: LinkListener) -> None:
    a, b = connect(listener, "socket")
    payload = filled(MIB)
    a.hub.send(a.link, 1, 1, payload)
    tensor = b.hub.receive(b.link, 1, 1).tensor(torch.uint8, (MIB,), 0)
    payload.view[5:6] = b"\x63"
    assert tensor[5] == 0x63
    a.hub.send(a.link, 1, 2, payload)
    a.hub.send(a.link, 2, 2, Slice(payload.memory, 0, MIB))
    assert b.hub.receive(b.link, 1, 2).memory is b.hub.receive(b.link, 2, 2).memory, "a memory is mapped once"
    a.close()
    b.close()


def test_messages_are_kept_until_they_are_asked_for(pair: Pair) -> None:
    a, b = pair
    for step in (1, 2):
        for group in (1, 2, 3):
            a.hub.send(a.link, group, step, filled(16, seed=10 * step + group))
    for group, step in [(3, 1), (3, 2), (1, 1), (2, 2), (1, 2), (2, 1)]:
        assert b.hub.receive(b.link, group, step).view == filled(16, seed=10 * step + group).view


def test_wait_takes_messages_of_all_links_in_order(listener: LinkListener) -> None:
    (a, b), (c, d) = connect(listener, "socket"), connect(listener, "grpc")
    hub = Hub()
    hub.add(b.link)
    hub.add(d.link)
    for group in range(5):
        a.hub.send(a.link, group, 1, filled(8))
        c.hub.send(c.link, group, 1, filled(8))
    messages = [hub.wait() for _ in range(10)]
    for link in (b.link, d.link):
        assert [message.group for message in messages if message.link is link] == list(range(5))
    hub.close()
    for end in (a, b, c, d):
        end.close()


def test_credit_bounds_what_is_sent(pair: Pair) -> None:
    a, b = pair
    a.link.limit_credit(3)
    sent: list[int] = []

    def send() -> None:
        for group in range(6):
            a.hub.send(a.link, group, 1, filled(100), window="credit")
            sent.append(group)
        a.hub.send(a.link, 100, 1, filled(100))

    thread = in_thread(send)
    for group in range(3):
        b.hub.receive(b.link, group, 1)
    assert not a.link.may_send(1, "credit")
    assert 3 not in sent
    b.link.grant(2)
    b.hub.receive(b.link, 4, 1)
    b.link.grant(1)
    b.hub.receive(b.link, 100, 1)
    thread.join()
    assert sent == [0, 1, 2, 3, 4, 5]


def test_a_sender_that_waits_still_hears(pair: Pair) -> None:
    a, b = pair
    a.link.limit_credit(0)
    thread = in_thread(lambda: a.hub.send(a.link, 1, 1, filled(8), window="credit"))
    b.hub.send(b.link, 9, 1, filled(8, seed=9))
    b.link.grant(1)
    b.hub.receive(b.link, 1, 1)
    thread.join()
    assert a.hub.receive(a.link, 9, 1).view == filled(8, seed=9).view


def test_acknowledgements_bound_how_many_steps_are_ahead(pair: Pair) -> None:
    a, b = pair
    a.link.limit_ahead(2)
    for step in (10, 20):
        a.hub.send(a.link, 1, step, filled(8), window="ack")
        a.hub.send(a.link, 2, step, filled(8), window="ack")
    assert not a.link.may_send(30, "ack")
    assert a.link.may_send(20, "ack"), "a step that has begun goes on"
    thread = in_thread(lambda: a.hub.send(a.link, 1, 30, filled(8), window="ack"))
    b.hub.receive(b.link, 1, 20)
    b.link.ack(10)
    b.hub.receive(b.link, 1, 30)
    thread.join()
    b.link.ack(30)
    a.hub.wait_acked(a.link, 30)
    assert a.link.acked_step == 30


def test_both_can_send_much_at_once(pair: Pair) -> None:
    a, b = pair
    payload = filled(24 * MIB)

    def exchange(end: End) -> None:
        for step in range(3):
            end.hub.send(end.link, 1, step, payload, as_bytes=True)
            assert end.hub.receive(end.link, 1, step).nbytes == payload.nbytes

    threads = [in_thread(partial(exchange, end)) for end in (a, b)]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def _nothing_until(ended: threading.Event) -> Iterator[bytes]:
    ended.wait()
    yield from ()


def test_a_link_that_nobody_drains_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group larger than what may wait for gRPC: the sender waits, and the rest stays in its memory."""
    monkeypatch.setattr(grpc_lane, "MAX_QUEUED_BYTES", 2 * MIB)
    monkeypatch.setattr(deadlines, "LINKS", replace(deadlines.LINKS, close=0.01))
    ended = threading.Event()
    link, hub = GrpcLink("far", abandon=ended.set), Hub()
    link.read_from(_nothing_until(ended))
    hub.add(link)
    payload = filled(20 * MIB)
    sender = in_thread(lambda: hub.send(link, 1, 1, payload, as_bytes=True))
    frames = link.outgoing()
    received = bytearray()
    most = 0
    while len(received) < payload.nbytes:
        message = next(frames)
        most = max(most, link.queued_bytes)
        received += parse(message)[1]
    sender.join(10)
    assert not sender.is_alive()
    assert received == payload.view
    assert most <= 3 * MIB + HEADER_BYTES
    link.close()
    hub.close()


def test_room_that_comes_before_the_wait_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that finds no room looks for frames next, which takes the event that tells of room."""
    monkeypatch.setattr(grpc_lane, "MAX_QUEUED_BYTES", 2 * MIB)
    monkeypatch.setattr(deadlines, "LINKS", replace(deadlines.LINKS, close=0.01))
    ended = threading.Event()
    link = GrpcLink("far", abandon=ended.set)
    link.read_from(_nothing_until(ended))
    link.post(1, 1, filled(20 * MIB), window=None, as_bytes=True)
    assert not link.flush()
    assert not link.poll()
    frames = link.outgoing()
    for _ in range(2):
        next(frames)
    assert link.poll()
    assert not link.poll()  # said once
    assert not link.flush()
    link.close()


def test_acknowledgements_never_block(pair: Pair) -> None:
    a, b = pair
    for step in range(1, 20001):
        a.link.ack(step)
    thread = in_thread(lambda: a.hub.wait_acked(a.link, 1))
    b.hub.wait_acked(b.link, 20000)
    b.link.ack(1)
    thread.join()


def test_stop_ends_every_wait(pair: Pair) -> None:
    a, _ = pair
    a.link.limit_credit(0)
    waits: list[Callable[[], object]] = [
        lambda: a.hub.receive(a.link, 1, 1),
        a.hub.wait,
        lambda: a.hub.send(a.link, 1, 1, filled(8), window="credit"),
        lambda: a.hub.wait_acked(a.link, 1),
    ]
    for index, wait in enumerate(waits):
        raised: list[BaseException] = []

        def run(wait: Callable[[], object] = wait, raised: list[BaseException] = raised) -> None:
            try:
                wait()
            except Stopped as stopped:
                raised.append(stopped)

        thread = in_thread(run)
        if index == 0:
            a.hub.stop()  # holds for those that follow too
        thread.join(5)
        assert raised


def test_an_ended_link_gives_what_it_had_and_then_says_so(pair: Pair) -> None:
    a, b = pair
    a.hub.send(a.link, 1, 1, filled(8))
    a.link.close()
    b.link.ack(1)  # nobody is left to hear it, which does no harm
    assert b.hub.receive(b.link, 1, 1).nbytes == 8
    with pytest.raises(LinkLost, match=r"link to dialler is lost: .*ended"):
        b.hub.receive(b.link, 2, 1)
    b.link.ack(2)


def test_frames_that_the_closing_end_never_read_lose_nothing(pair: Pair) -> None:
    a, b = pair
    for step in range(1, 5):
        b.hub.send(b.link, 5, step, filled(8))
    a.hub.send(a.link, 1, 1, filled(8))
    a.link.close()
    assert b.hub.receive(b.link, 1, 1).nbytes == 8
    with pytest.raises(LinkLost, match="ended"):
        b.hub.receive(b.link, 1, 2)


def test_the_end_of_one_link_does_not_disturb_the_others(listener: LinkListener, lane: str) -> None:
    (a, b), (c, d) = connect(listener, lane), connect(listener, lane)
    hub = Hub()
    hub.add(b.link)
    hub.add(d.link)
    a.link.close()

    def send_all() -> None:
        for step in range(100):
            c.hub.send(c.link, 1, step, filled(8))

    thread = in_thread(send_all)
    for step in range(100):
        assert hub.receive(d.link, 1, step).step == step
    thread.join()
    with pytest.raises(LinkLost, match="ended"):
        hub.wait()
    hub.close()
    for end in (a, b, c, d):
        end.close()


def test_sending_to_an_ended_link_is_an_error(pair: Pair) -> None:
    a, b = pair
    b.link.close()

    def send_on() -> None:
        for step in range(1000):
            a.hub.send(a.link, 1, step, filled(8))
            time.sleep(0.001)

    with pytest.raises(LinkLost, match="listener"):
        send_on()


@pytest.mark.parametrize("first", LANES)
@pytest.mark.parametrize("second", LANES)
@pytest.mark.parametrize("nbytes", [0, 100, 6 * MIB])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_messages_are_passed_on(listener: LinkListener, first: str, second: str, nbytes: int, as_bytes: bool) -> None:
    (a, b), (c, d), (e, f) = connect(listener, first), connect(listener, second), connect(listener, second)
    for step in range(3):
        payload = filled(nbytes, seed=step)
        thread = in_thread(partial(a.hub.send, a.link, 4, step, payload, as_bytes=as_bytes))
        message = b.hub.receive(b.link, 4, step)
        thread.join()

        def pass_on(message: Message = message) -> None:
            for end in (c, e):
                end.hub.forward(end.link, message)

        thread = in_thread(pass_on)
        arrived = [end.hub.receive(end.link, 4, step) for end in (d, f)]
        thread.join()
        for one in arrived:
            assert one.view == payload.view
            # On one host a large group is mapped, unless its sender wants to write it again.
            assert (one.memory is not None) == (second == "socket" and nbytes > INLINE_BYTES and not as_bytes)
    for end in (a, b, c, d, e, f):
        end.close()


def test_segments_that_were_closed_are_given_back(listener: LinkListener) -> None:
    a, b = connect(listener, "socket")
    for step in range(3000):  # more than a link may have at a time
        memory = SharedMemory.create(INLINE_BYTES + 1)
        a.hub.send(a.link, 1, step, Slice(memory, 0, memory.nbytes))
        b.hub.receive(b.link, 1, step)
        memory.close()
    a.close()
    b.close()
