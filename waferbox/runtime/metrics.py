"""The Prometheus endpoint of a role process. Imported only if the process has one."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from waferbox.rpc.address import is_loopback, reached_at
from waferbox.security.guard import CHALLENGE, may_view
from wsc.v1 import observation_pb2

ROLE: Final = "role"  # the label with a role's name, in all metrics


class MetricsServer:
    """The HTTP server of an endpoint, with its thread."""

    def __init__(self, collector: Collector, role: str, host: str, port: int) -> None:
        """
        Args:
            collector: the metrics.
            role: the name of the process's role.
            host: as `split_address` returns it; beyond loopback a request needs a token.
            port: the port; 0: any.

        Raises:
            OSError: the port is taken.
        """
        registry = CollectorRegistry()
        registry.register(collector)
        registry.register(_ProcessCollector(role))
        self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        if not is_loopback(host):
            app = self._server.get_app()
            assert app is not None
            self._server.set_app(_for_viewers(app))
        self.address = reached_at(host, int(self._server.server_port))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _for_viewers(app: WSGIApplication) -> WSGIApplication:
    """Returns the application, for requests with a token that gives the right to view."""

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if may_view(environ.get("HTTP_AUTHORIZATION", "")):
            return app(environ, start_response)
        start_response("401 Unauthorized", [CHALLENGE, ("Content-Type", "text/plain")])
        return [b"Unauthorized"]

    return guarded


class _ProcessCollector(Collector):
    """The official metrics of this process, with its role: a target's own labels depend on how Prometheus found it."""

    def __init__(self, role: str) -> None:
        self._labels = {ROLE: role}
        self._official = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        for metric in self._official.collect():
            metric.samples = [sample._replace(labels=self._labels) for sample in metric.samples]
            yield metric


class RoleCollector(Collector):
    """The figures of the execution that a role runs, made for each request.

    They begin at 0 with each execution, which Prometheus takes as a counter's reset.
    """

    def __init__(self, role: str, report: Callable[[], observation_pb2.NodeReport | None]) -> None:
        """report: returns the figures; None while no execution runs."""
        self._role = role
        self._report = report

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        running = GaugeMetricFamily("waferbox_running", "Whether an execution runs.", labels=[ROLE])
        running.add_metric([self._role], report is not None)
        yield running
        if report is not None:
            yield from report_metrics([ROLE], [([self._role], report)])


def report_metrics(
    labels: list[str], reports: list[tuple[list[str], observation_pb2.NodeReport]], prefix: str = "waferbox"
) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """Yields the metrics of reports, each with the values of the labels."""
    steps = CounterMetricFamily(f"{prefix}_steps", "Steps done in this execution.", labels=labels)
    seconds = CounterMetricFamily(
        f"{prefix}_step_seconds", "Where the time of this execution went.", labels=[*labels, "part"]
    )
    moved = CounterMetricFamily(f"{prefix}_bytes", "Bytes of groups on all links.", labels=[*labels, "direction"])
    queued = GaugeMetricFamily(
        f"{prefix}_queued", "Groups received and not used, or sent and not taken.", labels=[*labels, "queue"]
    )
    for values, report in reports:
        steps.add_metric(values, report.step)
        for part, value in report.seconds.items():
            if part != "total":
                seconds.add_metric([*values, part], value)
        for direction, count in report.bytes.items():
            moved.add_metric([*values, direction], count)
        for queue, count in report.queued.items():
            queued.add_metric([*values, queue], count)
    yield from (steps, seconds, moved, queued)
