"""The Prometheus metrics of the management service: nodes, jobs, the queue, and the progress of running jobs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from appliance.management.jobs import JobEntry
from appliance.management.service import ManagementState
from waferbox import roles
from waferbox.runtime.metrics import ROLE, report_metrics
from wsc.v1 import management_pb2

JOB = "cluster_job"  # `job` is the name of Prometheus itself for a scraped target


class ManagementCollector(Collector):
    """The collector of management's metrics."""

    def __init__(self, read: Callable[[], ManagementState]) -> None:
        """read: called at each scrape, in its thread."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        state = self._read()
        nodes = Counter((node.role, "leased" if node.job else "free") for node in state.nodes)
        nodes_metric = GaugeMetricFamily("waferbox_nodes", "Nodes of the cluster.", labels=[ROLE, "state"])
        for role in roles.REGISTERED:
            for lease in ("free", "leased"):
                nodes_metric.add_metric([role.name, lease], nodes[role.number, lease])
        yield nodes_metric

        jobs = state.jobs
        phases = Counter(job.report.phase for job in jobs)
        jobs_metric = GaugeMetricFamily("waferbox_jobs", "Jobs, also some that have ended.", labels=["phase"])
        for name, phase in management_pb2.JobPhase.items():
            if phase:
                jobs_metric.add_metric([name.removeprefix("JOB_PHASE_").lower()], phases[phase])
        yield jobs_metric
        yield GaugeMetricFamily(
            "waferbox_queue_length", "Jobs that wait for nodes.", value=phases[management_pb2.JOB_PHASE_QUEUED]
        )
        yield from self._live([job for job in jobs if not job.ended])

    def _live(self, jobs: Sequence[JobEntry]) -> Iterator[Metric]:
        scalar = GaugeMetricFamily("waferbox_job_scalar", "An output of a step: the loss.", labels=[JOB, "name"])
        cpu = CounterMetricFamily("waferbox_job_cpu_seconds", "Of a process of a job.", labels=[JOB, "node"])
        memory = GaugeMetricFamily("waferbox_job_memory_bytes", "Of a process of a job.", labels=[JOB, "node"])
        reports = []
        for job in jobs:
            for value in job.history.last_scalars():
                scalar.add_metric([job.name, value.name], value.value)
            for report in job.history.last_reports():
                reports.append(([job.name, report.node], report))
                cpu.add_metric([job.name, report.node], report.cpu_seconds)
                memory.add_metric([job.name, report.node], report.memory_bytes)
        yield from (scalar, cpu, memory)
        yield from report_metrics([JOB, "node"], reports, prefix="waferbox_job")
