"""The server of the gateway, with the services that the vendor's client calls."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Final

import grpc

from vendor_gateway.appliance_service import ApplianceService
from vendor_gateway.calls import CallerGuard, UnknownCalls, Unregistered
from vendor_gateway.control_service import ControlService
from vendor_gateway.management_service import ManagementService
from vendor_gateway.session import JobTarget
from vendor_gateway.sessions import VendorSessions
from vendor_wire import appliance_pb2_grpc, control_pb2_grpc, management_pb2_grpc
from waferbox import deadlines
from waferbox.rpc.address import split_address
from waferbox.rpc.server import server_options

MAX_THREADS: Final = 1024  # a client has five calls open, and five more while it sends weights
MAX_MESSAGE_BYTES: Final = 320 * 1024 * 1024  # the client sends tensors in parts of 256 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The settings of a gateway.

    Attributes:
        management: host:port of the management service.
        listen: host:port for clients.
        input_python: the path of the interpreter of the clients' environment.
        insecure: whether everybody who reaches the gateway may have jobs.
    """

    management: str
    listen: str
    input_python: str
    insecure: bool = False


class VendorGateway:
    """A gateway: a waferbox.runtime.node.Serving. Thread-safe. Raises OSError if it cannot listen at its address."""

    def __init__(self, settings: GatewaySettings, announce: IO[str] | None = None) -> None:
        """announce: `start` writes the address to it, as a line of JSON."""
        self.refusal = ""
        self._announce = announce
        self._over = threading.Event()
        host, port = split_address(settings.listen, any_port=True)
        if not settings.insecure and host not in ("127.0.0.1", "localhost", "[::1]", "::1"):
            raise OSError(
                f"{settings.listen} can be reached from other machines, and the vendor's client sends no token: listen "
                "at 127.0.0.1, or add --insecure if everybody who reaches it may have jobs"
            )
        self._sessions = VendorSessions(JobTarget(management=settings.management, input_python=settings.input_python))
        # Without TLS, even if the cluster uses it: the vendor's client has no certificate.
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="vendor"),
            options=server_options(MAX_MESSAGE_BYTES, for_scripts=True),
            interceptors=[] if settings.insecure else [CallerGuard()],
        )
        server: Any = Unregistered(self._server)
        management_pb2_grpc.add_ClusterManagementServicer_to_server(ManagementService(self._sessions), server)
        control_pb2_grpc.add_CsCtlV1Servicer_to_server(ControlService(self._sessions), server)
        appliance_pb2_grpc.add_ApplianceServicer_to_server(ApplianceService(self._sessions), server)
        self._server.add_generic_rpc_handlers((UnknownCalls(),))
        try:
            bound = self._server.add_insecure_port(settings.listen)
        except RuntimeError as error:
            raise OSError(f"nothing can listen at {settings.listen}: {error}") from error
        self.address = f"{host}:{bound or port}"

    def start(self) -> None:
        self._server.start()
        self._sessions.start()
        if self._announce is not None:
            print(json.dumps({"address": self.address}), file=self._announce, flush=True)

    def end(self) -> None:
        self._over.set()

    def wait(self) -> None:
        self._over.wait()

    def close(self) -> None:
        """Ends the clients' jobs, then the server."""
        self._sessions.close()
        self._server.stop(deadlines.END.server_grace).wait()
