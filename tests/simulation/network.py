"""The network of a simulated cluster: gRPC channels and servers, whose messages take the time that a seed draws.

A connection keeps the order of its messages; messages of different connections overtake each other. The messages that
are under way are lost with their connection. A connection breaks when a process at one of its ends dies, or when one
end has been silent for longer than gRPC's keepalive allows.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Sequence
from functools import partial
from typing import Any, Final

import grpc
from virtual_time import Process, World

KEEPALIVE_SECONDS: Final = 8.0  # a peer that is silent for so long is given up
CONNECT_SECONDS: Final = 0.002
SILENT_SECONDS: Final = 20.0  # how long a client waits for the answer to a connection
READY_SECONDS: Final = 4.0  # how long a client waits for a server that does not serve yet
CLOSED: Final = object()


class Network:
    """All servers and connections."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.servers: dict[str, Server] = {}  # by address
        self.connections: dict[Connection, None] = {}
        self._partitions: list[tuple[str, str, float]] = []  # two hosts that cannot reach each other, until a time
        # How fast this network is: seconds of most messages, and the part of them that take up to 300 ms.
        self._usual_seconds = world.random.choice([0.0002, 0.002, 0.02])
        self._late_part = world.random.choice([0.0, 0.05, 0.2])
        self._busy_part = world.random.choice([0.0, 0.1, 1.0])  # of the transports, which take no other message at once

    def latency(self) -> float:
        """Draws the seconds that a message takes."""
        drawn = self.world.random.random()
        if drawn < self._late_part:
            return 0.3 * drawn / self._late_part
        return self._usual_seconds * (0.05 + drawn)

    def is_busy(self) -> bool:
        """Draws whether a transport does not take another message at once."""
        return self.world.random.random() < self._busy_part

    def partition(self, one: str, other: str, seconds: float) -> None:
        """Lets no message pass between two hosts for so many seconds."""
        self.world.note(f"{one} and {other} are cut off from each other for {seconds:.1f} s")
        self._partitions.append((one, other, self.world.now + seconds))
        for connection in list(self.connections):
            if {connection.client.host, connection.server.process.host} == {one, other}:
                self.world.after(KEEPALIVE_SECONDS, self._break_if_cut, connection)

    def cut_until(self, one: str, other: str) -> float:
        """Returns the time until which no message passes between two hosts; a time in the past: they pass."""
        if not self._partitions:
            return 0.0
        return max((end for a, b, end in self._partitions if {a, b} == {one, other}), default=0.0)

    def return_host(self, host: str) -> None:
        """Lets a host that had vanished answer again: it refuses connections to the processes that it had."""
        for address, server in list(self.servers.items()):
            if server.process.has_vanished and server.process.host == host:
                del self.servers[address]

    def _break_if_cut(self, connection: "Connection") -> None:
        if self.cut_until(connection.client.host, connection.server.process.host) > self.world.now:
            connection.break_()

    def stalled(self, process: Process) -> None:
        """Breaks the connections of a stalled process once its peers have given it up."""
        connections = [each for each in self.connections if process in (each.client, each.server.process)]

        def give_up() -> None:
            if process.stalled_until > self.world.now:
                for connection in connections:
                    connection.break_()

        self.world.after(KEEPALIVE_SECONDS, give_up)


class Connection:
    """A connection of a channel to a server."""

    def __init__(self, network: Network, client: Process, server: "Server") -> None:
        self.network = network
        self.client = client
        self.server = server
        self.is_broken = False
        self.calls: dict[int, Call] = {}  # of the client
        self.handled: dict[int, ServerCall] = {}
        self._last = {client: 0.0, server.process: 0.0}  # by receiver: when its last message arrives
        network.connections[self] = None
        for process in (client, server.process):
            process.on_end.append(self._ended)

    def send(self, receiver: Process, deliver: Callable[..., object], *arguments: Any) -> None:
        """Delivers a message after a while, behind those that were sent before."""
        sender = self.client if receiver is self.server.process else self.server.process
        if self.is_broken or not sender.is_alive:
            return
        world = self.network.world
        cut = self.network.cut_until(self.client.host, self.server.process.host)
        when = max(self._last[receiver], cut, world.now) + self.network.latency()
        self._last[receiver] = when
        receiver.loop.arrive_at(when, self._arrive, deliver, *arguments)

    def _arrive(self, deliver: Callable[..., object], *arguments: Any) -> None:
        if not self.is_broken:
            deliver(*arguments)

    def break_(self, *, by_death: bool = False) -> None:
        """Breaks the connection. Both ends notice it, each after a while; the death of the other end soon."""
        if self.is_broken:
            return
        self.is_broken = True
        self.network.connections.pop(self, None)
        at_client, at_server = self._notice(by_death=by_death), self._notice(by_death=by_death)
        for call in list(self.calls.values()):
            if self.client.is_alive:
                self.client.loop.call_later(at_client, call.end, grpc.StatusCode.UNAVAILABLE, "the connection broke")
        for handled in list(self.handled.values()):
            if self.server.process.is_alive:
                self.server.process.loop.call_later(at_server, handled.cancel)

    def _notice(self, *, by_death: bool) -> float:
        """Seconds until an end notices that the connection has broken."""
        random = self.network.world.random
        return self.network.latency() if by_death or random.random() < 0.5 else random.uniform(0.0, KEEPALIVE_SECONDS)

    def _ended(self) -> None:
        """A process has ended. What it had sent before still arrives, unless it crashed or was killed."""
        world = self.network.world
        if self.client.has_vanished or self.server.process.has_vanished:
            world.after(KEEPALIVE_SECONDS, self.break_)
            return
        is_orderly = all(process.status in (None, 0, 1) for process in (self.client, self.server.process))
        in_flight = max(0.0, max(self._last.values()) - world.now) if is_orderly else 0.0
        world.after(in_flight + self.network.latency(), lambda: self.break_(by_death=True))


# --- Servers ----------------------------------------------------------------------------------------------------------


class Server:
    """The server of a process: an object to which generated code adds services."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        assert address not in network.servers
        self.network = network
        self.process = process
        self.address = address
        self.handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        network.servers[address] = self
        process.on_end.append(self.close)

    def close(self) -> None:
        """Refuses connections from now on; a host that has vanished does not answer at all."""
        if self.network.servers.get(self.address) is self and not self.process.has_vanished:
            del self.network.servers[self.address]

    def add_generic_rpc_handlers(self, handlers: Sequence[object]) -> None:
        """The handlers come by name as well."""

    def add_registered_method_handlers(
        self, service: str, handlers: "dict[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


class Context:
    """The context of a call in its handler."""

    def __init__(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = metadata
        self.callbacks: list[Callable[[Any], object]] = []
        self.is_over = False
        self.error: tuple[grpc.StatusCode, str] | None = None

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self.callbacks.append(callback)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.error = code, details
        raise grpc.aio.AbortError


class Inbox:
    """The messages of a call that have arrived, for the one coroutine that reads them."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, message: object) -> None:
        """Adds a message; CLOSED: there are no more."""
        self._messages.append(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> Any:
        """Waits for the next message, and removes it unless it is CLOSED."""
        while not self._messages:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._messages[0] if self._messages[0] is CLOSED else self._messages.popleft()


class ServerCall:
    """A call at the server's end."""

    def __init__(self, connection: Connection, call: "Call", handler: Any, metadata: Sequence[tuple[str, str]]) -> None:
        self._connection = connection
        self._call = call
        self._handler = handler
        self.context = Context(metadata)
        self._requests = Inbox()
        self._response: bytes | None = None  # the one of a call that has one, which goes with its status
        self._has_begun = False
        connection.handled[call.number] = self
        self._task = asyncio.get_running_loop().create_task(self._run())

    def request(self, data: object) -> None:
        """Takes a message of the client; CLOSED: there are no more."""
        self._requests.put(data if data is CLOSED else self._handler.request_deserializer(data))

    def cancel(self) -> None:
        self._task.cancel()
        if not self._has_begun:
            self._end(grpc.StatusCode.CANCELLED, "cancelled")

    async def _iterate(self) -> AsyncIterator[Any]:
        while (request := await self._requests.next()) is not CLOSED:
            yield request

    async def _run(self) -> None:
        self._has_begun = True
        code, details = grpc.StatusCode.OK, ""
        try:
            await self._handle()
        except asyncio.CancelledError:
            code, details = grpc.StatusCode.CANCELLED, "cancelled"
        except grpc.aio.AbortError:
            assert self.context.error is not None
            code, details = self.context.error
        except Exception as error:  # noqa: BLE001 - a defect of the simulated process
            code, details = grpc.StatusCode.UNKNOWN, f"Unexpected {error!r}"
            self._connection.network.world.defects.append(f"a handler of {self._call.method}: {error!r}")
        self._end(code, details)

    async def _handle(self) -> None:
        handler, connection = self._handler, self._connection
        requests = self._iterate() if handler.request_streaming else await self._requests.next()
        function = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if not handler.response_streaming:
            self._response = handler.response_serializer(await function(requests, self.context))
            return
        async for response in function(requests, self.context):
            connection.send(connection.client, self._call.response, handler.response_serializer(response))
            if connection.network.is_busy():
                await asyncio.sleep(connection.network.latency())  # until the transport takes another

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        self._connection.handled.pop(self._call.number, None)
        self._connection.send(self._connection.client, self._call.end, code, details, self._response)
        for callback in self.context.callbacks:
            callback(self.context)


# --- Channels ---------------------------------------------------------------------------------------------------------


class Channel:
    """A channel of a process to an address: an object from which generated code makes stubs."""

    def __init__(
        self, network: Network, process: Process, address: str, metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        """metadata: of each call, besides its own."""
        self._network = network
        self._process = process
        self._address = address
        self._metadata = tuple(metadata)
        self._connection: Connection | None = None
        self._numbers = itertools.count(1)
        self._calls: set[Call] = set()

    @property
    def connection(self) -> Connection | None:
        """The connection, if there is one."""
        return None if self._connection is None or self._connection.is_broken else self._connection

    async def connect(self, *, waits: bool) -> Connection:
        """Returns the connection, a new one if there is none.

        Waits for a server that is cut off or stalled, which does not refuse the connection. Raises ConnectionError if
        there is none, or too late.

        waits: waits for a server that is not there, too, for some seconds.
        """
        now = self._network.world.now
        end, silent_end = now + READY_SECONDS, now + SILENT_SECONDS
        while True:
            await asyncio.sleep(CONNECT_SECONDS)
            if (connection := self.connection) is not None:
                return connection
            server = self._network.servers.get(self._address)
            if server is not None:
                cut = self._network.cut_until(self._process.host, server.process.host)
                is_reached = server.process.is_alive and server.process.stalled_until <= self._network.world.now
                if cut <= self._network.world.now and is_reached:
                    self._connection = Connection(self._network, self._process, server)
                    return self._connection
                if self._network.world.now < silent_end:
                    await asyncio.sleep(0.2)
                    continue
            if not waits or self._network.world.now >= end:
                raise ConnectionError(f"failed to connect to {self._address}")
            await asyncio.sleep(0.2)

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **options: Any,
    ) -> Callable[..., "Call"]:
        return partial(self._call, method, request_serializer, response_deserializer)

    unary_stream = stream_unary = stream_stream = unary_unary

    def _call(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        wait_for_ready: bool = False,
    ) -> "Call":
        call = Call(
            self,
            next(self._numbers),
            method,
            request,
            request_serializer,
            response_deserializer,
            timeout,
            (*self._metadata, *metadata),
            wait_for_ready,
        )
        self._calls.add(call)
        return call

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()
        if self._connection is not None:
            self._connection.break_()


class Call:
    """A call at the client's end: awaitable for one response, iterable for a stream of them."""

    def __init__(
        self,
        channel: Channel,
        number: int,
        method: str,
        request: Any,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        timeout: float | None,
        metadata: Sequence[tuple[str, str]],
        wait_for_ready: bool,
    ) -> None:
        self.number = number
        self.method = method
        self._channel = channel
        self._serialize = serialize
        self._deserialize = deserialize
        self._responses = Inbox()
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        if (connection := channel.connection) is not None and not isinstance(request, AsyncIterable):
            self._send_whole(connection, request, metadata)
        else:
            self._task = loop.create_task(self._send(request, metadata, wait_for_ready))
        if timeout is not None:
            loop.call_later(timeout, self.end, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    async def _send(self, request: Any, metadata: Sequence[tuple[str, str]], waits: bool) -> None:
        try:
            connection = await self._channel.connect(waits=waits)
        except ConnectionError as error:
            self.end(grpc.StatusCode.UNAVAILABLE, str(error))
            return
        if not isinstance(request, AsyncIterable):
            self._send_whole(connection, request, metadata)
            return
        self._connection = connection
        connection.calls[self.number] = self
        server = connection.server.process
        connection.send(server, self._begin, connection, metadata)
        async for each in request:
            connection.send(server, self._pass, connection, self._serialize(each))
        connection.send(server, self._pass, connection, CLOSED)

    def _send_whole(self, connection: Connection, request: Any, metadata: Sequence[tuple[str, str]]) -> None:
        """Sends a call of one request, all of it at once, as gRPC does."""
        self._connection = connection
        connection.calls[self.number] = self
        data = self._serialize(request)
        connection.send(connection.server.process, self._begin, connection, metadata, data, CLOSED)

    def _begin(self, connection: Connection, metadata: Sequence[tuple[str, str]], *requests: object) -> None:
        """Begins the call at the server, in whose loop this is called."""
        handler = connection.server.handlers.get(self.method)
        if handler is None:
            connection.send(connection.client, self.end, grpc.StatusCode.UNIMPLEMENTED, f"no {self.method}")
            return
        call = ServerCall(connection, self, handler, metadata)
        for request in requests:
            call.request(request)

    def _pass(self, connection: Connection, data: object) -> None:
        if (handled := connection.handled.get(self.number)) is not None:
            handled.request(data)

    def _cancel_at_server(self, connection: Connection) -> None:
        if (handled := connection.handled.get(self.number)) is not None:
            handled.cancel()

    def response(self, data: bytes) -> None:
        if self._status is None:
            self._responses.put(self._deserialize(data))

    def end(self, code: grpc.StatusCode, details: str, response: bytes | None = None) -> None:
        """Ends the call, if it has not ended. response: the one of a call that has one."""
        if self._status is not None:
            return
        if response is not None:
            self._responses.put(self._deserialize(response))
        self._status = code, details
        self._responses.put(CLOSED)
        connection = self._connection
        if self._task is not None:
            self._task.cancel()
        if connection is not None:
            connection.calls.pop(self.number, None)
            if code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
                connection.send(connection.server.process, self._cancel_at_server, connection)

    def cancel(self) -> bool:
        self.end(grpc.StatusCode.CANCELLED, "cancelled by the client")
        return True

    async def _next(self) -> Any:
        """The next response; CLOSED after the last. Raises AioRpcError."""
        try:
            response = await self._responses.next()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if response is CLOSED:
            assert self._status is not None
            code, details = self._status
            if code is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)
        return response

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (response := await self._next()) is not CLOSED:
            yield response

    def __await__(self) -> Generator[Any, None, Any]:
        return self._next().__await__()
