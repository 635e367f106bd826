"""The Prometheus metrics of an ingress. Imported only if they are served."""

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class IngressCollector(Collector):
    """The collector of an ingress's metrics, which reads the values at each scrape."""

    def __init__(self, coordinators: Callable[[], int]) -> None:
        """coordinators: returns the number of those that run here."""
        self._coordinators = coordinators

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("waferbox_coordinators", "Coordinators of jobs that run.", value=self._coordinators())
