"""The life of a role's process: a gRPC server, registration with management, one job at a time."""

import argparse
import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from waferbox import deadlines
from waferbox.host.descriptors import raise_descriptor_limit
from waferbox.launch.process import let_wafers_compute
from waferbox.launch.stop_signals import on_stop_signal
from waferbox.links.listener import LinkListener
from waferbox.links.socket_names import host_id
from waferbox.roles import WAFER, Role
from waferbox.rpc.address import bind, split_address
from waferbox.rpc.loop_channel import LoopChannel
from waferbox.rpc.loop_method import LoopMethod
from waferbox.rpc.loop_thread import LoopThread
from waferbox.rpc.server import make_channel, make_server
from waferbox.runtime.logs import set_up_logging
from waferbox.runtime.node_job import JobContext, NodeJob
from waferbox.runtime.node_service import Emit, NodeService
from waferbox.runtime.registration import Registration
from waferbox.runtime.threaded_job import ThreadedJob
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import management_pb2, node_pb2, node_pb2_grpc

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The settings of every role's process.

    Attributes:
        management: the host:port of management.
        listen: the host:port of the process's own server; port 0: any.
        threads: the threads that compute.
        metrics_port: the port of the Prometheus endpoint; 0: any; None: no endpoint.
        states_in_files: whether a shard of MemoryX keeps the states of jobs in files.
    """

    management: str
    listen: str = "127.0.0.1:0"
    threads: int = 1
    metrics_port: int | None = None
    states_in_files: bool = False


def add_arguments(parser: argparse.ArgumentParser, listen: str) -> None:
    """Adds the options of a process that registers with management. listen: the help of --listen."""
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
    """Returns a parser of the settings of every role, to which a role may add its own."""
    parser = argparse.ArgumentParser(prog=f"python -m {role.module}")
    add_arguments(parser, "where this process listens")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    return parser


def node_settings(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> NodeSettings:
    """Returns the parsed settings. Ends the process with a message if they are not valid."""
    if arguments.threads < 1:
        parser.error("--threads must be at least 1")
    return NodeSettings(
        management=arguments.management,
        listen=arguments.listen,
        threads=arguments.threads,
        metrics_port=arguments.metrics_port,
    )


class _AttachMethod(node_pb2_grpc.NodeServiceServicer):
    """The NodeService of a server with threads, which an event loop serves."""

    def __init__(self, service: NodeService, loop: LoopThread) -> None:
        self._attach = LoopMethod(service.Attach, loop)

    def Attach(
        self, request_iterator: Iterator[node_pb2.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[node_pb2.AttachResponse]:
        return self._attach(request_iterator, context)


class Node:
    """A role's process: its server, and an event loop with its registration and the job that it works for.

    Thread-safe. The server has threads, for the links and states of jobs.
    """

    def __init__(
        self,
        role: Role,
        settings: NodeSettings,
        make_job: Callable[[JobContext], NodeJob],
        *,
        add_services: Callable[[grpc.Server, LinkListener], None] | None = None,
        on_job_ended: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            role: the role.
            settings: the settings of the process.
            make_job: makes the job of each coordinator that attaches.
            add_services: adds the role's own services to the server.
            on_job_ended: called in a thread with the name of a job that has ended, if the role keeps states on disk.
        """
        self.refusal = ""  # the reason why the node must exit
        self._over = threading.Event()
        self._server = make_server()
        self.address = bind(self._server, settings.listen)
        self._states_in_files = settings.states_in_files
        self.listener = LinkListener(self.address, self._listener_failed)
        self.listener.add_to_server(self._server)
        self._loop = LoopThread(name="control", on_defect=lambda error: self._refused(f"a defect: {error!r}"))
        self._registration = Registration(
            settings.management,
            self._hello,
            self._refused,
            _open_channel,
            None if on_job_ended is None else partial(_run_in_thread, on_job_ended),
        )
        self._make_job = make_job
        self._service = NodeService(
            self._make_attached_job, self.listener.endpoint, lambda: self._registration.instance, self._refused
        )
        node_pb2_grpc.add_NodeServiceServicer_to_server(_AttachMethod(self._service, self._loop), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), self._server)
        if add_services is not None:
            add_services(self._server, self.listener)
        self._metrics = None
        if settings.metrics_port is not None:
            from waferbox.runtime.metrics import MetricsServer, RoleCollector

            host = split_address(settings.listen, any_port=True)[0]
            self._metrics = MetricsServer(
                RoleCollector(role.name, self._service.report), role.name, host, settings.metrics_port
            )
        self._role = role

    def start(self) -> None:
        self._loop.start()
        self._server.start()
        self._loop.run(self._register())
        logger.debug("listening at %s", self.address)

    def end(self) -> None:
        """Makes `wait` return. From any thread."""
        self._over.set()

    def wait(self) -> None:
        """Waits until `end` is called, or the node must exit."""
        self._over.wait()

    def close(self) -> None:
        """Ends the registration and the job, and closes all links and ports."""
        self._loop.run(self._registration.close())
        if self._metrics is not None:
            self._metrics.close()
        self._server.stop(deadlines.END.server_grace).wait()
        self._loop.run(self._service.close())
        self.listener.close()
        self._loop.stop()

    async def _register(self) -> None:
        self._registration.start()

    def _make_attached_job(self, attach: node_pb2.AttachJob, emit: Emit) -> ThreadedJob:
        context = JobContext(
            job=attach.job, node=attach.node, index=attach.index, lane=attach.lane, listener=self.listener, emit=emit
        )
        return ThreadedJob(self._make_job(context))

    def _hello(self) -> management_pb2.RegisterRequest:
        attached_job = self._service.attached_job
        return management_pb2.RegisterRequest(
            role=self._role.number,
            address=self.address,
            host=host_id(),
            version=WIRE_VERSION,
            process_id=os.getpid(),
            job=attached_job.job,
            member=attached_job.node,
            metrics="" if self._metrics is None else self._metrics.address,
            states_in_files=self._states_in_files,
        )

    def _listener_failed(self, defect: Exception) -> None:
        """Ends the node, on which no job can have links any more; a job that waits for one has failed."""
        self._refused(f"links are not taken any more: {type(defect).__name__}: {defect}")

    def _refused(self, message: str) -> None:
        self.refusal = message
        self._over.set()


def _run_in_thread(on_job_ended: Callable[[str], None], job: str) -> None:
    asyncio.get_running_loop().run_in_executor(None, on_job_ended, job)


def _open_channel(address: str) -> grpc.aio.Channel:
    return LoopChannel(make_channel(address, ""))  # type: ignore[return-value]  # it has the methods that stubs use


def run_node(
    role: Role,
    settings: NodeSettings,
    make_job: Callable[[JobContext], NodeJob],
    *,
    add_services: Callable[[grpc.Server, LinkListener], None] | None = None,
    on_job_ended: Callable[[str], None] | None = None,
) -> int:
    """Runs a node until SIGTERM or SIGINT, in the main thread. Returns the exit status of the process.

    The process registers with management, renews its lease, registers again with a restarted management, and serves
    NodeService, health and the links' stream.
    """
    if role is not WAFER:
        let_wafers_compute()
    return serve(lambda: Node(role, settings, make_job, add_services=add_services, on_job_ended=on_job_ended))


class Serving(Protocol):
    """The work of a process of the cluster, from its start to its end."""

    refusal: str  # the reason why the process must exit, once `wait` has returned

    def start(self) -> None: ...

    def end(self) -> None:
        """Makes `wait` return. From any thread."""

    def wait(self) -> None:
        """Waits until `end` is called, or the process must exit."""

    def close(self) -> None: ...


def serve(make: Callable[[], Serving]) -> int:
    """Runs the result of `make`, which may raise OSError, as `run_node` runs a node."""
    set_up_logging()
    raise_descriptor_limit()  # each link has some
    # Imported modules stay: no garbage collection visits them again, which takes half a second with torch at the exit.
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
