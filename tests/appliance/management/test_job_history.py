"""What is kept of a job has limits, whatever its coordinator says."""

from appliance import job_history
from appliance.job_history import BATCH_BYTES, BATCH_EVENTS, KINDS, JobHistory, batches
from waferbox.rpc.server import SMALL_MESSAGE_BYTES
from wsc.v1.observation_pb2 import JobEvent, LogRecord, NodeReport, Scalar

LONG = "x" * 100_000


def test_names_and_figures_are_cut() -> None:
    history = JobHistory()
    history.add(
        [
            JobEvent(log=LogRecord(node=LONG, logger=LONG, message=LONG)),
            JobEvent(scalar=Scalar(name=LONG)),
            JobEvent(report=NodeReport(node=LONG, seconds={str(number): 1.0 for number in range(1000)})),
        ]
    )
    assert sum(event.ByteSize() for event in history.kept(KINDS)) < 20_000


def test_reports_are_kept_of_so_many_nodes() -> None:
    history = JobHistory()
    history.add([JobEvent(report=NodeReport(node=f"n{number}")) for number in range(job_history.MAX_NODES + 10)])
    assert len(history.last_reports()) == job_history.MAX_NODES


def test_batches_are_of_a_moderate_size() -> None:
    long = [JobEvent(log=LogRecord(message="ü" * 10_000)) for _ in range(1000)]
    short = [JobEvent(scalar=Scalar(step=step)) for step in range(1100)]
    for events in (long, short):
        sent = list(batches(events))
        assert [event for batch in sent for event in batch.events] == events
        assert all(len(batch.events) <= BATCH_EVENTS and batch.ByteSize() < 2 * BATCH_BYTES for batch in sent)
    assert 2 * BATCH_BYTES < SMALL_MESSAGE_BYTES
    assert list(batches([])) == []
