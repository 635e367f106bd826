"""What a process of a job says of itself about once a second."""

import os
import time
from collections.abc import Iterable

from interconnect.links.link import Link
from nodes.telemetry.progress import Progress
from wsc.v1 import observation_pb2

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """The physical memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES


def process_report(node: str) -> observation_pb2.NodeReport:
    """What can be said of any process."""
    return observation_pb2.NodeReport(
        node=node, time=time.time(), cpu_seconds=time.process_time(), memory_bytes=resident_bytes()
    )


def node_report(node: str, execution: int, progress: Progress, links: Iterable[Link]) -> observation_pb2.NodeReport:
    """What can be said of one that runs an execution."""
    links = list(links)
    report = process_report(node)
    report.execution, report.step, report.done_steps = execution, progress.step, progress.done_steps
    report.seconds.update(progress.seconds())
    report.bytes["received"] = sum(link.received_bytes for link in links)
    report.bytes["sent"] = sum(link.sent_bytes for link in links)
    report.queued["received"] = sum(len(link.inbox) for link in links)
    report.queued["sent"] = sum(link.not_taken for link in links)
    return report
