"""A slow link slows a wafer, and fills neither its memory nor that of who is at the other end."""

import time
from collections.abc import Iterator

import pytest
from cluster_rig import forking, hosts_or_skip
from role_server import RoleServer

from benchmarks.memory import DEEP_LAYERS, DEEP_WIDTH, measure
from benchmarks.network import Host

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

STEPS = 2
BYTES_PER_SECOND = 20_000_000  # of what the wafer's host sends
RATE = "2gbit"  # of all else: weights come fast, so that gradients are made faster than they leave
WEIGHT_BYTES = DEEP_WIDTH * DEEP_WIDTH * 4  # of one layer of the model
TOLERANCE_BYTES = 16 << 20


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    with hosts_or_skip(2, RATE, f"{8 * BYTES_PER_SECOND // 1_000_000}mbit") as made:
        yield made


def test_gradients_wait_at_their_wafer_within_its_memory(two_hosts: list[Host], role_server: RoleServer) -> None:
    host, wafer_host = two_hosts
    begin = time.monotonic()
    figures = measure("deep", 1, host=host, wafer_host=wafer_host, steps=STEPS, start=forking(role_server))
    gradient_bytes = DEEP_LAYERS * WEIGHT_BYTES
    assert wafer_host.sent_bytes() >= STEPS * gradient_bytes
    assert time.monotonic() - begin >= STEPS * gradient_bytes / BYTES_PER_SECOND
    # Received weights, which stay until the backward pass, and what waits for the link come on top of what is told for
    # one host.
    wafer = figures["wafer-0"]
    assert wafer.planned <= wafer.measured <= wafer.planned + wafer.link
    shard = figures["memoryx-0"]
    assert shard.measured <= shard.planned + shard.link + TOLERANCE_BYTES
