"""The ingress before this one has died with its coordinators: management is told of their jobs, should it not know."""

import asyncio
import logging
from typing import Final

import grpc

from appliance.coordinator.left_jobs import LeftJobs
from appliance.coordinator.record import LEFT_SECONDS
from interconnect.security.guard import bearer
from interconnect.security.own_tokens import cluster_secret
from interconnect.security.tokens import Kind
from wsc.v1 import management_pb2, management_pb2_grpc

LOOK_SECONDS: Final = 0.5  # between looks for coordinators that have ended

logger = logging.getLogger(__name__)


async def tell_of_left_jobs(left: LeftJobs, management: grpc.aio.Channel) -> None:
    """Until management has been told of all; it may have died too, and not be back yet."""
    stub: management_pb2_grpc.ManagementAsyncStub = management_pb2_grpc.ManagementStub(management)
    while left:
        await asyncio.gather(*(_tell(hello, stub) for hello in await asyncio.to_thread(left.take)))
        await asyncio.sleep(LOOK_SECONDS)


async def _tell(hello: management_pb2.CoordinatorHello, stub: "management_pb2_grpc.ManagementAsyncStub") -> None:
    request = management_pb2.TakeUpJobRequest(hello=hello)
    shown = (bearer(cluster_secret().token(Kind.COORDINATOR, hello.job)),)
    try:
        await stub.TakeUpJob(request, timeout=LEFT_SECONDS, metadata=shown, wait_for_ready=True)
    except grpc.RpcError as error:
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
        logger.warning("%s is given up: management does not take it up: %s", hello.job, reason)
