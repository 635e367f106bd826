"""What the gateway tells of a call whose other end has died in the middle of it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from appliance.ingress import gateway


class BrokenCall:
    """As grpc.aio has it, whose connection breaks while it reads."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self._error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"one"
        raise self._error

    def cancel(self) -> None:
        pass


class Aborted(Exception):
    """By the gateway."""


class Context:
    def time_remaining(self) -> float:
        return 1.0

    async def abort(self, code: grpc.StatusCode, details: str, metadata: object) -> None:
        raise Aborted(code, details)


@pytest.mark.parametrize(
    ("code", "details", "told"),
    [
        (grpc.StatusCode.INTERNAL, "Internal error from Core", grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.INTERNAL, "a defect", grpc.StatusCode.INTERNAL),
        (grpc.StatusCode.NOT_FOUND, "no such job", grpc.StatusCode.NOT_FOUND),
    ],
)
def test_a_broken_connection_is_told_as_such(code: grpc.StatusCode, details: str, told: grpc.StatusCode) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)

    class Channel:
        def stream_stream(self, *args: object, **kwargs: object) -> Any:
            return lambda *args, **kwargs: BrokenCall(error)

    async def requests() -> AsyncIterator[bytes]:
        yield b"asked"

    async def hand_on() -> list[bytes]:
        channel: Any = Channel()
        context: Any = Context()
        handed = gateway._forward(channel, "/x/y", (), requests(), context, gateway._details)
        return [message async for message in handed]

    with pytest.raises(Aborted) as caught:
        asyncio.run(hand_on())
    assert caught.value.args == (told, details)
