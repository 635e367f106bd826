"""The Prometheus figures of an ingress. Imported only where they are wanted."""

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class IngressCollector(Collector):
    """Reads what there is when somebody asks."""

    def __init__(self, coordinators: Callable[[], int]) -> None:
        """coordinators: how many run here."""
        self._coordinators = coordinators

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("waferbox_coordinators", "Coordinators of jobs that run.", value=self._coordinators())
