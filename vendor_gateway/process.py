"""The process of the gateway: its server, and its clients."""

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
    """What the gateway is told when it is started."""

    management: str  # host:port
    listen: str
    input_python: str
    insecure: bool = False  # whoever reaches it may have jobs


class VendorGateway:
    """An waferbox.runtime.node.Serving. Raises OSError if it cannot listen there."""

    def __init__(self, settings: GatewaySettings, announce: IO[str] | None = None) -> None:
        """announce: gets the address as a line of JSON, once calls are served."""
        self.refusal = ""
        self._announce = announce
        self._over = threading.Event()
        host, port = split_address(settings.listen, any_port=True)
        if not settings.insecure and host not in ("127.0.0.1", "localhost", "[::1]", "::1"):
            raise OSError(
                f"{settings.listen} can be reached from elsewhere, and the vendor's client shows no token: listen at "
                "127.0.0.1, or add --insecure where everybody who reaches it may have jobs"
            )
        self._sessions = VendorSessions(JobTarget(management=settings.management, input_python=settings.input_python))
        # Without TLS, whatever the cluster uses: this client has no certificate to show.
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
        """End the clients' jobs, then the server."""
        self._sessions.close()
        self._server.stop(deadlines.END.server_grace).wait()
