"""How fast the links are: goodput of a weight stream on each lane, beside memcpy and gRPC streams; and one hop.

Two processes, the sender as MemoryX has it and the receiver as a wafer has it, with the wafer's credit window. The
receiver copies every group out into memory of its own, on either lane, so that shared memory has to move its bytes too.
All kinds take turns in one run: what counts are the ratios of their medians.

A bare gRPC stream sends one message again and again, which nobody reads. What a stream of weights adds to it in any
Python program is measured one after the other: the message is made of a header and a weight, since grpcio takes `bytes`
alone; both ends compute the checksum; the receiver copies the weight out. The rest is the lane's own.

    python -m benchmarks.streams
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import grpc
import torch
import xxhash

from waferbox.host.memory import keep_large_blocks
from waferbox.links.dialling import dial
from waferbox.links.frame import HEADER_BYTES
from waferbox.links.hub import Hub
from waferbox.links.link import Link
from waferbox.links.listener import LinkListener
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.rpc.server import LARGE_MESSAGE_BYTES, make_channel, server_options
from waferbox.runtime.schedule import WEIGHTS_CREDIT_BATCH, WEIGHTS_WINDOW
from wsc.v1 import node_pb2

LANES = {"shared memory": node_pb2.LANE_SHARED_MEMORY, "gRPC": node_pb2.LANE_GRPC}
GROUP_BYTES = 1024 * 1024  # as the compiler coalesces
NUM_GROUPS = 256
HOPS = 2000
REPEATS = 7
# Streams of gRPC without the lane, by what they do with a message; each does what the one before does, too.
BARE_STREAMS = ("bare gRPC", "+ joined", "+ checksums", "+ copied out")
START_SECONDS = 60.0
BARE = "bench.Bare"


def measure(repeats: int = REPEATS) -> dict[str, list[float]]:
    """GB/s, `repeats` times each: "memcpy", "shared memory", those of BARE_STREAMS, "gRPC"."""
    found: dict[str, list[float]] = {kind: [] for kind in ("memcpy", "shared memory", *BARE_STREAMS, "gRPC")}
    with _Sender() as sender:
        for _ in range(repeats):
            found["memcpy"].append(_memcpy())
            for kind in BARE_STREAMS:
                found[kind].append(sender.bare(kind))
            for lane in LANES:
                found[lane].append(sender.stream(lane))
    return found


def measure_hops() -> dict[str, tuple[float, float]]:
    """For each lane: the latency of one hop, and the processor time of both ends for it; in microseconds."""
    with _Sender() as sender:
        return {lane: sender.hop(lane) for lane in LANES}


def main() -> None:
    print(f"weight stream, {NUM_GROUPS} groups of {GROUP_BYTES // 2**20} MiB, each copied out by the receiver")
    found = measure()
    for kind, values in found.items():
        print(f"  {kind:16s} {statistics.median(values):6.2f} GB/s   ({min(values):.2f} to {max(values):.2f})")
    for lane, against in (
        ("shared memory", "memcpy"),
        ("gRPC", "bare gRPC"),
        (BARE_STREAMS[-1], "bare gRPC"),
        ("gRPC", BARE_STREAMS[-1]),
    ):
        ratio = statistics.median(a / b for a, b in zip(found[lane], found[against], strict=True))
        print(f"  {lane} / {against}: {ratio:.2f}")
    print("one hop, there and back halved (a reference to 1 MiB; over gRPC 64 bytes)")
    for lane, (latency, processor) in measure_hops().items():
        print(f"  {lane:16s} {latency:6.1f} us, {processor:6.1f} us of processor time at both ends together")


def _memcpy() -> float:
    source = torch.ones(NUM_GROUPS * GROUP_BYTES, dtype=torch.uint8)
    target = torch.empty(GROUP_BYTES, dtype=torch.uint8)
    target.zero_()
    begin = time.perf_counter()
    for index in range(NUM_GROUPS):
        target.copy_(source[index * GROUP_BYTES : (index + 1) * GROUP_BYTES])
    return NUM_GROUPS * GROUP_BYTES / (time.perf_counter() - begin) / 1e9


def _raise_defect(defect: Exception) -> None:
    raise defect


class _Sender:
    """This process, as MemoryX; owns the receiving process and the links to it."""

    def __enter__(self) -> "_Sender":
        torch.set_num_threads(1)
        keep_large_blocks()  # as every process with a server does
        # As make_server's, but for the guard, which knows no bare stream.
        self._server = grpc.server(ThreadPoolExecutor(8), options=server_options(LARGE_MESSAGE_BYTES))
        address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._listener = LinkListener(address, _raise_defect)
        self._listener.add_to_server(self._server)
        self._memory = SharedMemory.create(NUM_GROUPS * GROUP_BYTES)
        self._memory.tensor(torch.uint8, (self._memory.nbytes,), 0).fill_(1)
        handler = grpc.unary_stream_rpc_method_handler(self._bare_messages)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BARE, {"Stream": handler}),))
        self._server.start()
        pending = {lane: self._listener.expect(lane, "receiver") for lane in LANES}
        endpoint = self._listener.endpoint()
        setting = {"address": endpoint.address, "host": endpoint.host, "socket": endpoint.socket}
        self._receiver = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.streams", "receive", json.dumps(setting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._links = {lane: pending[lane].wait(START_SECONDS) for lane in LANES}
        self._hub = Hub()
        for link in self._links.values():
            link.limit_credit(WEIGHTS_WINDOW)
            self._hub.add(link)
        self._step = 0
        for lane in LANES:
            self.stream(lane)  # shared memory mapped, pages and buffers there
        return self

    def __exit__(self, *error: object) -> None:
        for link in self._links.values():
            link.close()
        self._hub.close()
        _pipe(self._receiver.stdin).close()
        self._receiver.wait(START_SECONDS)
        _pipe(self._receiver.stdout).close()
        self._listener.close()
        self._server.stop(None).wait()
        self._memory.close()

    def stream(self, lane: str) -> float:
        """GB/s of one stream of weights."""
        link = self._links[lane]
        self._step += 1
        self._order("stream", lane, self._step)
        begin = time.perf_counter()
        for group in range(NUM_GROUPS):
            self._hub.send(
                link, group, self._step, Slice(self._memory, group * GROUP_BYTES, GROUP_BYTES), window="credit"
            )
        self._hub.wait_acked(link, self._step)
        return NUM_GROUPS * GROUP_BYTES / (time.perf_counter() - begin) / 1e9

    def bare(self, kind: str) -> float:
        """GB/s of a gRPC stream without the lane, of BARE_STREAMS."""
        self._order("bare", kind, 0)
        return NUM_GROUPS * GROUP_BYTES / self._answer() / 1e9

    def hop(self, lane: str) -> tuple[float, float]:
        """Latency and processor time of one hop, in microseconds: a median, and a mean."""
        link = self._links[lane]
        self._step += 1
        self._order("hop", lane, self._step)
        payload = Slice(self._memory, 0, GROUP_BYTES if lane == "shared memory" else 64)
        latencies = []
        busy = time.process_time()
        for _ in range(HOPS):
            begin = time.perf_counter()
            self._hub.send(link, 0, self._step, payload)
            self._hub.receive(link, 0, self._step)
            latencies.append((time.perf_counter() - begin) / 2 * 1e6)
        busy = time.process_time() - busy + self._answer()
        return statistics.median(latencies), busy / (2 * HOPS) * 1e6

    def _bare_messages(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        level = BARE_STREAMS.index(request.decode())
        message = bytes(HEADER_BYTES + GROUP_BYTES)
        for group in range(NUM_GROUPS):
            if level:
                weight = Slice(self._memory, group * GROUP_BYTES, GROUP_BYTES).view
                checksum = xxhash.xxh3_64_intdigest(weight) if level > 1 else 0
                message = b"".join((checksum.to_bytes(HEADER_BYTES, "little"), weight))
            yield message

    def _order(self, kind: str, lane: str, step: int) -> None:
        pipe = _pipe(self._receiver.stdin)
        pipe.write(json.dumps([kind, lane, step]) + "\n")
        pipe.flush()

    def _answer(self) -> float:
        return float(_pipe(self._receiver.stdout).readline())


class _Receiver:
    """The receiving process, as a wafer."""

    def __init__(self, endpoint: node_pb2.LinkEndpoint) -> None:
        torch.set_num_threads(1)
        keep_large_blocks()
        self._links: dict[str, Link] = {
            name: dial(endpoint, name, name="sender", own_name="receiver", lane=lane, deadline_seconds=START_SECONDS)
            for name, lane in LANES.items()
        }
        self._hub = Hub()
        for link in self._links.values():
            self._hub.add(link)
        self._channel = make_channel(endpoint.address)
        self._target = torch.zeros(GROUP_BYTES, dtype=torch.uint8)

    def stream(self, lane: str, step: int) -> None:
        link = self._links[lane]
        for group in range(NUM_GROUPS):
            message = self._hub.receive(link, group, step)
            self._target.copy_(message.tensor(torch.uint8, (GROUP_BYTES,), 0))
            if group % WEIGHTS_CREDIT_BATCH == WEIGHTS_CREDIT_BATCH - 1:
                link.grant(WEIGHTS_CREDIT_BATCH)
        link.ack(step)

    def hop(self, lane: str, step: int) -> None:
        link = self._links[lane]
        busy = time.process_time()
        for _ in range(HOPS):
            self._hub.forward(link, self._hub.receive(link, 0, step))
        print(time.process_time() - busy, flush=True)

    def bare(self, kind: str, step: int) -> None:
        stream = self._channel.unary_stream(f"/{BARE}/Stream", request_serializer=None, response_deserializer=None)
        level = BARE_STREAMS.index(kind)
        begin = time.perf_counter()
        for message in stream(kind.encode()):
            weight = memoryview(message)[HEADER_BYTES:]
            if level > 1:
                assert xxhash.xxh3_64_intdigest(weight) == int.from_bytes(message[:HEADER_BYTES], "little")
            if level > 2:
                self._target.copy_(torch.frombuffer(weight, dtype=torch.uint8))
        print(time.perf_counter() - begin, flush=True)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._hub.close()
        self._channel.close()


def _receive(setting: dict[str, Any]) -> None:
    receiver = _Receiver(node_pb2.LinkEndpoint(**setting))
    orders = {"stream": receiver.stream, "hop": receiver.hop, "bare": receiver.bare}
    for line in sys.stdin:
        kind, lane, step = json.loads(line)
        orders[kind](lane, step)
    receiver.close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


if __name__ == "__main__":
    if sys.argv[1:2] == ["receive"]:
        _receive(json.loads(sys.argv[2]))
    else:
        main()
