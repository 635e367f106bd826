"""The service of a node in its event loop: which coordinators attach, and what becomes of a job whose call ends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc
import pytest
from tokens_shown import shown

from waferbox.host.threads import CancellationToken
from waferbox.rpc.loop_method import CallAborted, CallContext
from waferbox.runtime.node_service import Emit, NodeService
from waferbox.security.tokens import Kind
from wsc.v1 import node_pb2, observation_pb2

INSTANCE = "instance-1"
DEADLINE = 20.0


class Job:
    """A job whose commands and end wait until they are released."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.released = asyncio.Event()
        self.is_closed = False
        self.tokens: list[CancellationToken] = []

    def report(self) -> observation_pb2.NodeReport | None:
        return None

    def check_progress(self) -> None:
        pass

    async def execute(
        self, command: node_pb2.AttachRequest, cancellation: CancellationToken
    ) -> node_pb2.AttachResponse | None:
        self.tokens.append(cancellation)
        self.begun.put_nowait(command.WhichOneof("kind") or "")
        await self.released.wait()
        return None

    async def close(self) -> None:
        self.begun.put_nowait("close")
        await self.released.wait()
        self.is_closed = True


class Node:
    """A service with one job at a time, and the requests of its coordinator; None ends them."""

    def __init__(self) -> None:
        self.job = Job()
        self.requests: asyncio.Queue[node_pb2.AttachRequest | None] = asyncio.Queue()
        self.service = NodeService(self._make_job, node_pb2.LinkEndpoint, lambda: INSTANCE, pytest.fail)

    def _make_job(self, attach: node_pb2.AttachJob, emit: Emit) -> Job:
        return self.job

    def attach(self, *, instance: str = INSTANCE, lease: int = 1) -> AsyncIterator[node_pb2.AttachResponse]:
        async def requests() -> AsyncIterator[node_pb2.AttachRequest]:
            yield node_pb2.AttachRequest(attach=node_pb2.AttachJob(job="job-1", node="wafer-0"))
            while (request := await self.requests.get()) is not None:
                yield request

        context = CallContext(shown(Kind.LEASE, "job-1", instance, str(lease)))
        return self.service.Attach(requests(), context)


def run(test: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE):
            await test(Node())

    asyncio.run(within_deadline())


def test_a_job_is_dropped_to_its_end_although_its_call_is_cancelled() -> None:
    """A coordinator may end its requests, and cancel the call at once."""

    async def test(node: Node) -> None:
        reading = asyncio.create_task(_read(node.attach()))
        node.requests.put_nowait(None)
        assert await node.job.begun.get() == "close"
        reading.cancel()
        await asyncio.wait([reading])
        assert node.service.attached_job.job == "job-1"  # the node is not free yet
        node.job.released.set()
        await node.service.close()
        assert node.job.is_closed
        assert not node.service.attached_job.job

    run(test)


def test_a_cancelled_call_ends_the_wait_of_a_command() -> None:
    async def test(node: Node) -> None:
        reading = asyncio.create_task(_read(node.attach()))
        node.requests.put_nowait(node_pb2.AttachRequest(load=node_pb2.Load(epoch=1)))
        assert await node.job.begun.get() == "load"
        reading.cancel()
        await asyncio.wait([reading])
        assert node.job.tokens[0].cancelled
        node.job.released.set()
        await node.service.close()
        assert node.job.is_closed

    run(test)


@pytest.mark.parametrize(("instance", "lease"), [("instance-0", 2), (INSTANCE, 0)], ids=["another node's", "older"])
def test_a_lease_of_another_registration_or_an_older_one_is_refused(instance: str, lease: int) -> None:
    async def test(node: Node) -> None:
        reading = asyncio.create_task(_read(node.attach()))
        node.requests.put_nowait(None)
        node.job.released.set()
        await reading
        with pytest.raises(CallAborted) as caught:
            await anext(node.attach(instance=instance, lease=lease))
        assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED

    run(test)


async def _read(responses: AsyncIterator[node_pb2.AttachResponse]) -> None:
    with suppress(StopAsyncIteration):
        while True:
            await anext(responses)
