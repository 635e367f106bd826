"""A management service with thousands of nodes, dozens of jobs and hundreds of watchers; and with huge messages."""

import asyncio
import os
import signal
import subprocess
import sys

import grpc
import pytest
from tokens_shown import shown

from benchmarks.light_nodes import LightClient, LightCoordinators, LightNodes
from benchmarks.nodes import NUM_JOBS, NUM_NODES, NUM_WAFERS, SHARES, management, usage
from waferbox.rpc.server import SMALL_MESSAGE_BYTES, make_channel
from waferbox.security.tokens import Kind
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import (
    management_pb2,
    management_pb2_grpc,
    node_pb2,
    observation_pb2,
    observation_pb2_grpc,
)

pytestmark = pytest.mark.cluster

NUM_CONNECTIONS = 50
NUM_WATCHERS = 300  # more than there ever were threads
DEADLINE_SECONDS = 110.0  # 15 s where nothing else runs
LEASE_SECONDS = 60.0  # long, for the nodes of this busy process
NOTICED_SECONDS = 15.0  # much less than a lease
MAX_GROWTH_BYTES = 64 * 1024 * 1024
HUGE_BYTES = 200 * 1024 * 1024

# A node in a process of its own, which can be killed.
ONE_NODE = """
import sys
from waferbox.rpc.server import make_channel
from waferbox.wire_version import WIRE_VERSION
from waferbox.security.tokens import cluster_secret
from waferbox.security.tokens import Kind
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2
import queue
channel = make_channel(sys.argv[1], cluster_secret().token(Kind.NODE))
hello = management_pb2.RegisterRequest(role=node_pb2.ROLE_WAFER, address="127.0.0.1:1", version=WIRE_VERSION)
requests = queue.SimpleQueue()
requests.put(hello)
for response in management_pb2_grpc.ManagementStub(channel).Register(iter(requests.get, None)):
    print(response.node_id, flush=True)
"""


async def keep_cluster_busy(address: str) -> None:
    async with LightNodes(address, NUM_CONNECTIONS) as nodes, LightClient(address) as client:
        for role, share in SHARES:
            await nodes.register(role, NUM_NODES * share // 100)
        assert len(await client.nodes()) == NUM_NODES
        coordinators = LightCoordinators(address, NUM_WAFERS, 1.0)
        async with coordinators.serving() as ingress, grpc.aio.insecure_channel(address) as channel:
            await nodes.register(node_pb2.ROLE_INGRESS, 1, ingress)
            await client.create_jobs(1, NUM_WAFERS)
            (job,) = await client.jobs()
            watching = observation_pb2_grpc.ObservationStub(channel)
            request = observation_pb2.WatchJobRequest(job=job.job, follow=True)
            watchers = [watching.WatchJob(request, metadata=shown(Kind.ADMIN)) for _ in range(NUM_WATCHERS)]
            waiting = [
                asyncio.ensure_future(
                    client.stub.ListNodes(
                        management_pb2.ListNodesRequest(at_least=10**9, wait_seconds=1), metadata=shown(Kind.ADMIN)
                    )
                )
                for _ in range(NUM_WATCHERS)
            ]
            await client.create_jobs(NUM_JOBS - 1, NUM_WAFERS)
            while any(job.phase != management_pb2.JOB_PHASE_SUCCEEDED for job in await client.jobs()):
                await asyncio.sleep(0.3)
            assert len(await client.jobs()) == NUM_JOBS
            assert not coordinators.shared
            for watcher in watchers:
                assert [events async for events in watcher] == []
            await asyncio.gather(*waiting)
        assert not any(node.job for node in await client.nodes())
        assert not nodes.broken()
        await check_killed_node(address, client)


async def check_killed_node(address: str, client: LightClient) -> None:
    before = len(await client.nodes())
    process = subprocess.Popen([sys.executable, "-c", ONE_NODE, address], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline)
    assert len(await client.nodes()) == before + 1
    os.kill(process.pid, signal.SIGKILL)
    assert await client.until_nodes(before) < NOTICED_SECONDS
    process.communicate()


def test_thousands_of_nodes_and_their_jobs() -> None:
    async def with_deadline(address: str) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await keep_cluster_busy(address)

    with management(LEASE_SECONDS) as (address, pid):
        asyncio.run(with_deadline(address))
        assert usage(pid).threads < 64


def test_messages_that_are_too_large_are_refused_unread() -> None:
    with management() as (address, pid), make_channel(address) as channel:
        stub = management_pb2_grpc.ManagementStub(channel)
        stub.ListJobs(management_pb2.ListJobsRequest(), timeout=20)
        before = usage(pid).resident_bytes
        request = management_pb2.CreateJobRequest(version=WIRE_VERSION, user="u" * HUGE_BYTES)
        for _ in range(4):
            with pytest.raises(grpc.RpcError) as caught:
                stub.CreateJob(request, timeout=60)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(SMALL_MESSAGE_BYTES) in str(caught.value.details())
        assert usage(pid).resident_bytes - before < MAX_GROWTH_BYTES
