"""The life cycle of every role process: a gRPC server, registration with management, one job at a time."""

import argparse
import gc
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from waferbox import __version__, deadlines
from waferbox.host.descriptors import raise_descriptor_limit
from waferbox.launch.process import let_wafers_compute
from waferbox.launch.stop_signals import on_stop_signal
from waferbox.links.listener import LinkListener
from waferbox.links.socket_names import host_id
from waferbox.roles import WAFER, Role
from waferbox.rpc.address import bind, split_address
from waferbox.rpc.server import make_server
from waferbox.runtime.logs import set_up_logging
from waferbox.runtime.node_job import JobContext, NodeJob
from waferbox.runtime.node_service import Leases, NodeService
from waferbox.runtime.registration import Registration
from wsc.v1 import management_pb2, node_pb2_grpc

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings that every role process has."""

    management: str  # host:port
    listen: str = "127.0.0.1:0"
    threads: int = 1
    metrics_port: int | None = None  # 0: any; None: no endpoint


def add_arguments(parser: argparse.ArgumentParser, listen: str) -> None:
    """The options of whatever registers with management. listen: what --listen says."""
    parser.add_argument("--management", required=True, metavar="HOST:PORT", help="where the management service listens")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help=listen)
    parser.add_argument(
        "--metrics-port", type=int, metavar="N", help="serve figures for Prometheus; 0: at any port; default: at none"
    )


def parse_arguments(role: Role, argv: Sequence[str] | None) -> NodeSettings:
    """`python -m <module> --management host:port [--listen 127.0.0.1:0] [--threads 1] [--metrics-port N]`."""
    parser = node_parser(role)
    return node_settings(parser, parser.parse_args(argv))


def node_parser(role: Role) -> argparse.ArgumentParser:
    """For the settings that every role process has, and those that a role adds."""
    parser = argparse.ArgumentParser(prog=f"python -m {role.module}")
    add_arguments(parser, "where this process listens")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    return parser


def node_settings(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> NodeSettings:
    """What was parsed; ends the process, with the reason, where it cannot be meant so."""
    if arguments.threads < 1:
        parser.error("--threads must be at least 1")
    return NodeSettings(
        management=arguments.management,
        listen=arguments.listen,
        threads=arguments.threads,
        metrics_port=arguments.metrics_port,
    )


class Node:
    """One role process: its server, its place at management, and the job that it works for."""

    def __init__(
        self,
        role: Role,
        settings: NodeSettings,
        make_job: Callable[[JobContext], NodeJob],
        *,
        add_services: Callable[[grpc.Server, LinkListener], None] | None = None,
    ) -> None:
        """make_job is called once for each job that attaches; add_services adds what the role serves besides."""
        self.refusal = ""  # why the node cannot go on
        self._over = threading.Event()
        self._server = make_server()
        self.address = bind(self._server, settings.listen)
        self.listener = LinkListener(self.address, self._listener_failed)
        self.listener.add_to_server(self._server)
        self._registration = Registration(settings.management, self._hello, self._refused)
        leases = Leases(lambda: self._registration.instance)
        self._service = NodeService(make_job, self.listener, leases, self._refused)
        node_pb2_grpc.add_NodeServiceServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), self._server)
        if add_services is not None:
            add_services(self._server, self.listener)
        self._metrics = None
        if settings.metrics_port is not None:
            from waferbox.runtime.metrics import MetricsServer, RoleCollector

            host = split_address(settings.listen, any_port=True)[0]
            self._metrics = MetricsServer(RoleCollector(role.name, self._service.report), host, settings.metrics_port)
        self._role = role

    def start(self) -> None:
        self._server.start()
        self._registration.start()
        logger.debug("listening at %s", self.address)

    def end(self) -> None:
        """Make wait return. From any thread."""
        self._over.set()

    def wait(self) -> None:
        """Until end is called, or management refuses the node."""
        self._over.wait()

    def close(self) -> None:
        """Leave management, drop the job, close every link and port."""
        self._registration.close()
        if self._metrics is not None:
            self._metrics.close()
        self._server.stop(deadlines.END.server_grace).wait()
        self._service.close()
        self.listener.close()

    def _hello(self) -> management_pb2.RegisterRequest:
        attached_job = self._service.attached_job
        return management_pb2.RegisterRequest(
            role=self._role.number,
            address=self.address,
            host=host_id(),
            version=__version__,
            process_id=os.getpid(),
            job=attached_job.job,
            member=attached_job.node,
            metrics="" if self._metrics is None else self._metrics.address,
        )

    def _listener_failed(self, defect: Exception) -> None:
        """No job can have links here any more; the one that waits for some has been told."""
        self._refused(f"links are not taken any more: {type(defect).__name__}: {defect}")

    def _refused(self, message: str) -> None:
        self.refusal = message
        self._over.set()


def run_node(
    role: Role,
    settings: NodeSettings,
    make_job: Callable[[JobContext], NodeJob],
    *,
    add_services: Callable[[grpc.Server, LinkListener], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status. To be called in the main thread, as the whole process.

    The process registers with management, keeps its lease alive (and comes back when management does), and serves
    NodeService, health and the links' stream.
    """
    if role is not WAFER:
        let_wafers_compute()
    return serve(lambda: Node(role, settings, make_job, add_services=add_services))


class Serving(Protocol):
    """What a process of the cluster does, from its start to its end."""

    refusal: str  # why management will not have it, once wait has returned

    def start(self) -> None: ...

    def end(self) -> None:
        """Make wait return. From any thread."""

    def wait(self) -> None:
        """Until end is called, or management refuses."""

    def close(self) -> None: ...


def serve(make: Callable[[], Serving]) -> int:
    """As run_node, with whatever make makes; it may raise OSError."""
    set_up_logging()
    raise_descriptor_limit()  # each link has some
    # What is imported stays: no collection looks at it again, nor do those at the end, half a second with torch.
    gc.freeze()
    try:
        node = make()
    except OSError as error:
        logger.error("%s", error)
        return 1

    with on_stop_signal(node.end, on_defect=lambda _: node.end()):
        node.start()
        node.wait()
        node.close()
    if node.refusal:
        logger.error("%s", node.refusal)
        return 1
    return 0
