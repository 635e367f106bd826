"""Every method of every service is called with every kind of token, and opens to those whom the table names, alone."""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from tokens_shown import token

import wsc.v1
from waferbox.links.grpc_lane import METHOD
from waferbox.rpc.address import bind
from waferbox.rpc.async_server import AsyncServer
from waferbox.rpc.server import make_channel, make_server
from waferbox.security import guard
from waferbox.security.rights import RIGHTS, JobScope, Right
from waferbox.security.tokens import Caller, ClusterSecret, Kind

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[2]
SECONDS = 20.0
OWN, OTHER = "job-1", "job-2"
OWNERS = {OWN: "ada", OTHER: "bob"}
OPENED = grpc.StatusCode.DATA_LOSS  # what the methods of this test answer

WRONG = {
    "nothing": "",
    "no token": "rubbish",
    "a token of another cluster": ClusterSecret(b"another").token(Kind.ADMIN),
    "a name without its proof": f"user:ada:{'0' * 64}",
    "another user's proof": "user:ada:PROOF",
}
CALLERS = [
    *(Caller(kind=kind, names=()) for kind in (Kind.NODE, Kind.MANAGEMENT, Kind.ADMIN, Kind.VIEWER)),
    *(Caller(kind=kind, names=(job,)) for kind in (Kind.COORDINATOR, Kind.JOB, Kind.MEMBER) for job in (OWN, OTHER)),
    *(Caller(kind=Kind.USER, names=(user,)) for user in ("ada", "bob")),
    Caller(kind=Kind.LEASE, names=(OWN, "instance", "1")),
]


def methods() -> dict[str, MethodDescriptor | None]:
    """All that there are, by path; the links' stream is described nowhere."""
    modules = [importlib.import_module(f"wsc.v1.{module.name}") for module in pkgutil.iter_modules(wsc.v1.__path__)]
    services = [
        service
        for module in [*modules, health_pb2]
        if module.__name__.endswith("_pb2")
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    found = {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}
    return {**found, METHOD: None}


class EveryMethod(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic for mypy only
    """Serves whatever is called, as its service says, and answers OPENED."""

    def __init__(self, *, is_async: bool) -> None:
        self._is_async = is_async

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = methods()[handler_call_details.method]
        if method is None:
            return self._handler("stream_stream")
        message = GetMessageClass(method.input_type)
        streams = (method.client_streaming, method.server_streaming)
        name = {(False, False): "unary_unary", (False, True): "unary_stream", (True, True): "stream_stream"}[streams]
        return self._handler(name, request_deserializer=message.FromString)

    def _handler(self, name: str, **codecs: Any) -> Any:
        make: Callable[..., Any] = getattr(grpc, f"{name}_rpc_method_handler")

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            context.abort(OPENED, "")

        async def answer_async(request: Any, context: Any) -> Any:
            await context.abort(OPENED, "")

        async def stream_async(request: Any, context: Any) -> Any:
            await context.abort(OPENED, "")
            yield

        if not self._is_async:
            return make(answer, **codecs)
        return make(answer_async if name == "unary_unary" else stream_async, **codecs)


@contextmanager
def serving(kind: str) -> Iterator[str]:
    if kind == "threads":
        server = make_server(job=OWN)
        server.add_generic_rpc_handlers((EveryMethod(is_async=False),))
        address = bind(server, "127.0.0.1:0")
        server.start()
        yield address
        server.stop(0).wait()
    else:
        loop = AsyncServer(on_defect=lambda error: pytest.fail(str(error)), owner_of=OWNERS.get)
        loop.server.add_generic_rpc_handlers((EveryMethod(is_async=True),))
        address = bind(loop.server, "127.0.0.1:0")
        loop.start()
        yield address
        loop.stop(0)


def answer_to(address: str, path: str, shown: str) -> grpc.StatusCode:
    """What a call for the job OWN is answered."""
    method = methods()[path]
    message: bytes | Message = b""
    serializer: Callable[[Any], bytes] | None = None
    if method is not None:
        kind = GetMessageClass(method.input_type)
        message = kind(**({"job": OWN} if "job" in method.input_type.fields_by_name else {}))
        serializer = kind.SerializeToString
    with make_channel(address, "") as channel:
        metadata = (("authorization", f"Bearer {shown}"),) if shown else ()
        # On the wire a call with one message is a stream of one.
        call = channel.stream_stream(path, request_serializer=serializer, response_deserializer=None)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([message]), metadata=metadata, timeout=SECONDS))
    return caught.value.code()


def is_open(right: Right, caller: Caller, *, knows_job: bool) -> bool:
    if caller.kind not in right.kinds:
        return False
    match right.job_scope, caller.kind:
        case (JobScope.OWN, Kind.JOB) | (JobScope.SERVED, Kind.JOB):
            return caller.name == OWN or not (knows_job or right.job_scope is JobScope.OWN)
        case (JobScope.OWN, Kind.MEMBER):
            return caller.name == OWN
        case (JobScope.OWN, Kind.USER):
            return caller.name == OWNERS[OWN] or not OWNERS
    return True


@pytest.mark.parametrize("kind", ["threads", "event loop"])
@pytest.mark.parametrize("path", RIGHTS)
def test_a_method_opens_to_those_whom_the_table_names_alone(path: str, kind: str) -> None:
    right = RIGHTS[path]
    users_are_told_apart = kind == "event loop"  # where management is
    with serving(kind) as address:
        for name, template in WRONG.items():
            wrong = template.replace("PROOF", token(Kind.USER, "bob").rpartition(":")[2])
            expected = grpc.StatusCode.UNAUTHENTICATED if right.kinds else OPENED
            assert answer_to(address, path, wrong) == expected, name
        for caller in CALLERS:
            if caller.kind is Kind.USER and right.job_scope is JobScope.OWN and not users_are_told_apart:
                continue
            opens = not right.kinds or is_open(right, caller, knows_job=kind == "threads")
            answer = answer_to(address, path, token(caller.kind, *caller.names))
            assert answer == (OPENED if opens else grpc.StatusCode.PERMISSION_DENIED), caller


def test_the_table_has_every_method_and_no_other() -> None:
    assert RIGHTS.keys() == methods().keys()


def test_all_servers_are_guarded() -> None:
    makers = [
        path.relative_to(ROOT).as_posix()
        for folder in (
            "appliance",
            "client",
            "interconnect",
            "memoryx",
            "nodes",
            "swarmx",
            "wafer",
            "waferbox",
            "workers",
        )
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"grpc\.(aio\.)?server\(", path.read_text())
    ]
    assert sorted(makers) == ["waferbox/rpc/async_server.py", "waferbox/rpc/server.py"]


def test_who_guesses_is_answered_shortly_and_hinders_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "MAX_IN_WINDOW", 3)
    path = "/wsc.v1.Management/ListJobs"
    with serving("event loop") as address:
        guesses = [answer_to(address, path, f"admin:{number:064}") for number in range(5)]
        assert guesses == [grpc.StatusCode.UNAUTHENTICATED] * 3 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        assert answer_to(address, path, token(Kind.ADMIN)) == OPENED
    assert "admin:" not in caplog.text
    assert len([record for record in caplog.records if "bore no token" in record.message]) == 1


def test_what_is_kept_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_ADDRESSES", 10)
    seen = guard.WrongTokens()
    for number in range(1000):
        seen.is_too_many(f"ipv4:10.0.{number // 256}.{number % 256}:5")
    assert len(seen._seen) == 10
