"""Who may call the gateway, and what is said of calls that it does not serve."""

import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from vendor_gateway import calls
from vendor_gateway.calls import CallerGuard, UnknownCalls, Unregistered, authority_of, owner_of
from vendor_gateway.process import GatewaySettings, VendorGateway
from vendor_wire import control_pb2, control_pb2_grpc


def test_a_socket_of_this_machine_has_an_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        port = mine.getsockname()[1]
        assert owner_of(f"ipv4:127.0.0.1:{port}") == os.getuid()
    assert owner_of("ipv4:192.0.2.1:4000") is None
    assert owner_of("unix:/tmp/socket") is None
    assert owner_of("ipv4:127.0.0.1:none") is None


class Control(control_pb2_grpc.CsCtlV1Servicer):
    def Get(self, request: control_pb2.GetRequest, context: grpc.ServicerContext) -> control_pb2.GetResponse:
        return control_pb2.GetResponse(type=authority_of(context))


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[CallerGuard()])
    control_pb2_grpc.add_CsCtlV1Servicer_to_server(Control(), Unregistered(server))  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((UnknownCalls(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_a_call_has_the_authority_that_its_client_names(address: str) -> None:
    for authority in ("wsjob-0123456789abcdef", "b.example"):
        with grpc.insecure_channel(address, options=[("grpc.default_authority", authority)]) as channel:
            stub = control_pb2_grpc.CsCtlV1Stub(channel)
            assert stub.Get(control_pb2.GetRequest(), timeout=10).type == authority


def test_another_user_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "owner_of", lambda peer: os.getuid() + 1)
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        control_pb2_grpc.CsCtlV1Stub(channel).Get(control_pb2.GetRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]
    assert "--insecure" in caught.value.details()  # type: ignore[attr-defined]


def test_a_call_that_is_not_served_is_logged_once(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with grpc.insecure_channel(address) as channel:
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/cerebras.Appliance/UnaryReconfigure", None, None)(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["UnaryReconfigure" in record.getMessage() for record in warned] == [True]


def test_it_listens_on_this_machine_alone_unless_it_is_told() -> None:
    settings = {"management": "127.0.0.1:1", "listen": "0.0.0.0:0", "input_python": "python"}
    with pytest.raises(OSError, match="--insecure"):
        VendorGateway(GatewaySettings(**settings))  # type: ignore[arg-type]
