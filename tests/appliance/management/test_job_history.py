"""What is kept of a job has limits, whatever its coordinator says."""

from appliance import job_history
from appliance.job_history import BATCH_BYTES, BATCH_EVENTS, KINDS, JobHistory, batches
from waferbox.rpc.server import SMALL_MESSAGE_BYTES
from wsc.v1.observation_pb2 import JobEvent, LayerTime, LogRecord, NodeReport, Scalar

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


def test_times_by_layer_are_kept_in_the_last_report_of_an_execution_alone() -> None:
    history = JobHistory()
    layers = [LayerTime(layer=f"layer {number}", compute=1.0) for number in range(50)]
    for execution in (1, 2):
        for step in range(1, 11):
            report = NodeReport(node="wafer-0", execution=execution, step=step, layers=layers)
            history.add([JobEvent(report=report)])
            history.add([JobEvent(report=NodeReport(node="memoryx-0", execution=execution, step=step))])
    kept = history.kept(KINDS)
    assert [event.number for event in kept] == list(range(1, 41))  # none is lost
    with_layers = [event.report for event in kept if event.report.layers]
    assert [(report.execution, report.step) for report in with_layers] == [(1, 10), (2, 10)]
    assert list(with_layers[0].layers) == layers
    successor = JobHistory()
    successor.add(kept)
    assert successor.kept(KINDS) == kept


def test_times_by_layer_have_limits() -> None:
    history = JobHistory()
    for layers in ([LayerTime(layer=LONG)], [LayerTime()] * (job_history.MAX_LAYERS + 1)):
        history.add([JobEvent(report=NodeReport(execution=1, layers=layers))])
    for execution in range(2, 12):
        history.add([JobEvent(report=NodeReport(execution=execution, layers=[LayerTime(layer="fc1")]))])
    with_layers = [event.report.execution for event in history.kept(KINDS) if event.report.layers]
    assert with_layers == list(range(12 - job_history.MAX_MEASURED, 12))
