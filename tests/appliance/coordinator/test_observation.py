"""What can be seen of a job through the management service: its log, reports, numbers and traces."""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from cluster_in_process import Client, ClusterInProcess

from appliance import job_history
from appliance.coordinator.execution.results import ScalarSampler
from appliance.job_history import KINDS, JobHistory, TooSlow
from waferbox.runtime import outbox
from waferbox.runtime.logs import advise
from waferbox.runtime.node_job import JobContext, JobFailure
from waferbox.runtime.role_job import report_failure
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, plan_pb2
from wsc.v1.observation_pb2 import JobEvent, LogRecord, NodeReport, Scalar, Span, TraceJobRequest, WatchJobRequest

FULL = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}
CONSUMED = coordinator_pb2.Consumed


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(outbox, "BATCH_SECONDS", 0.05)
    levels = {package: logging.getLogger(package).level for package in ("wafer", "appliance")}
    for package in levels:
        logging.getLogger(package).setLevel(logging.INFO)  # setLevel: loggers remember what they let through
    yield
    for package, level in levels.items():
        logging.getLogger(package).setLevel(level)


class Running:
    """A client whose job runs steps as far as they are let go on."""

    def __init__(self, cluster: ClusterInProcess, client: Callable[..., Client], num_steps: int) -> None:
        self.steps = {name: threading.Semaphore(0) for name in ("memoryx-0", "wafer-0", "worker-0")}
        for name in self.steps:
            cluster.behaviour.on_step[name] = self.wait
        self.client = client()
        self.job: str = self.client.created.job
        self.client.compile()
        self.client.begin(num_steps)
        self.client.start()

    def wait(self, context: JobContext, step: int) -> None:
        self.steps[context.node].acquire(timeout=10)

    def go(self, steps: int) -> None:
        for semaphore in self.steps.values():
            semaphore.release(steps)

    def finish(self) -> None:
        for response in self.client.call:
            for outputs in response.outputs.steps:
                self.client.consumed(outputs.step)
        self.client.close()


def events(
    cluster: ClusterInProcess, job: str, follow: bool = False, kinds: tuple[str, ...] = ()
) -> Iterator[JobEvent]:
    request = WatchJobRequest(job=job, follow=follow, kinds=kinds)
    for lot in cluster.observation.WatchJob(request, timeout=20):
        yield from lot.events


def test_a_watcher_sees_history_and_then_what_happens_until_the_end(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)
    running = Running(cluster, client, 6)
    running.go(2)
    cluster.until(lambda: any(e.scalar.step == 1 for e in events(cluster, running.job, kinds=("scalar",))))
    watched = events(cluster, running.job, follow=True)
    seen = [next(watched)]
    logging.getLogger("wafer.test").error("hot")  # not a second later, but at once
    while seen[-1].log.message != "hot":
        seen.append(next(watched))
    running.go(4)
    running.finish()
    seen += watched  # ends with the job
    assert list(events(cluster, running.job)) == seen
    assert not any(event.log.verdict for event in seen)  # it did not fail
    numbers = {(event.scalar.name, event.scalar.step): event.scalar.value for event in seen if event.HasField("scalar")}
    assert numbers["output_1", 1] == 1.0
    assert numbers["output_1", 6] == 6.0
    assert {name for name, _ in numbers} == {"output_1", "output_3"}  # not the one with several numbers
    assert all(value == step for (_, step), value in numbers.items())
    assert {event.scalar.execution for event in seen if event.HasField("scalar")} == {1}
    last = {event.report.node: event.report for event in seen if event.HasField("report")}
    assert {"memoryx-0", "wafer-0", "worker-0"} <= last.keys()
    assert (last["wafer-0"].step, last["wafer-0"].execution) == (6, 1)
    assert last["wafer-0"].memory_bytes > 2**20
    logs = {(event.log.node, event.log.message) for event in seen if event.HasField("log")}
    assert ("wafer-0", "hot") in logs
    assert ("coordinator", "step artifact-good is compiled") in logs


@pytest.mark.defects
def test_the_first_cause_is_the_last_line_of_the_log(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**FULL)
    running = Running(cluster, client, 6)

    def break_down(context: JobContext, step: int) -> None:
        report_failure(
            context,
            JobFailure(node_pb2.Failure.KIND_INPUT, "sample 30 is not a picture", traceback="the user's\ntraceback"),
        )
        raise ValueError("a consequence")

    cluster.behaviour.on_step["wafer-0"] = break_down
    running.go(1)
    failure = running.client.failure()
    running.go(6)
    assert failure.message == "sample 30 is not a picture"
    seen = list(events(cluster, running.job, follow=True, kinds=("log",)))
    (verdict,) = (event.log for event in seen if event.log.verdict)
    assert verdict == seen[-1].log
    assert (verdict.message, verdict.level) == (failure.message, logging.ERROR)
    assert any("the user's\ntraceback" in event.log.message for event in seen)


def test_advice_reaches_the_client_once_whoever_gives_it(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)
    running = Running(cluster, client, 3)

    def say(context: JobContext, step: int) -> None:
        advise("disk", f"no room on the disk of {context.node}")
        advise("network", "a slow network")

    cluster.behaviour.on_step["wafer-0"] = cluster.behaviour.on_step["memoryx-0"] = say
    running.go(3)
    kinds = list(itertools.islice(running.client.session, 3))
    assert kinds[0].WhichOneof("kind") == "ready"
    assert sorted(response.advice for response in kinds[1:]) in (
        ["a slow network", "no room on the disk of memoryx-0"],
        ["a slow network", "no room on the disk of wafer-0"],
    )
    cluster.stub.CancelJob(management_pb2.CancelJobRequest(job=running.job))
    assert [response.WhichOneof("kind") for response in running.client.session] == ["failure"]


def test_a_trace_is_of_the_same_steps_on_all_nodes(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**FULL)
    running = Running(cluster, client, 1500)
    running.go(4)
    cluster.until(lambda: any(e.report.step > 1 for e in events(cluster, running.job, kinds=("report",))))
    spans: list[Span] = []
    call = cluster.observation.TraceJob(TraceJobRequest(job=running.job, num_steps=3), timeout=20)

    def read() -> None:
        spans.extend(span for response in call for span in response.spans)

    reader = threading.Thread(target=read)
    reader.start()
    cluster.until(lambda: cluster.behaviour.told_to_trace == running.steps.keys())  # before they pass its first step
    with pytest.raises(grpc.RpcError, match="is being traced already"):
        list(cluster.observation.TraceJob(TraceJobRequest(job=running.job, num_steps=1), timeout=20))
    running.go(1500)
    running.finish()
    reader.join(20)
    assert not reader.is_alive()
    by_node: dict[str, list[int]] = {}
    for span in spans:
        by_node.setdefault(span.node, []).append(span.step)
    assert by_node.keys() == running.steps.keys()
    first = by_node["wafer-0"][0]
    assert first > 4
    assert all(steps == [first, first + 1, first + 2] for steps in by_node.values())


@pytest.mark.parametrize(
    ("call", "request_", "code", "text"),
    [
        ("WatchJob", WatchJobRequest(job="nobody"), grpc.StatusCode.NOT_FOUND, "no job 'nobody'"),
        ("WatchJob", WatchJobRequest(kinds=["rumour"]), grpc.StatusCode.INVALID_ARGUMENT, "report, log, scalar"),
        ("TraceJob", TraceJobRequest(num_steps=0), grpc.StatusCode.INVALID_ARGUMENT, "1 to 1000"),
        ("TraceJob", TraceJobRequest(num_steps=5), grpc.StatusCode.FAILED_PRECONDITION, "runs no steps now"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    cluster: ClusterInProcess, client: Callable[..., Client], call: str, request_: Any, code: grpc.StatusCode, text: str
) -> None:
    cluster.add(**FULL)
    request_.job = request_.job or client().created.job
    with pytest.raises(grpc.RpcError, match=text) as error:
        list(getattr(cluster.observation, call)(request_, timeout=20))
    assert error.value.code() == code


def test_a_job_keeps_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_history, "MAX_POINTS", 100)
    history = JobHistory()
    history.add([JobEvent(log=LogRecord(message="x" * 20_000))])
    for step in range(1, 10_001):
        history.add([JobEvent(scalar=Scalar(name="loss", step=step)), JobEvent(report=NodeReport(node="n", step=step))])
    kept = history.kept(KINDS)
    reports = [event.report.step for event in kept if event.HasField("report")]
    assert reports == list(range(10_001 - job_history.MAX_REPORTS, 10_001))
    steps = [event.scalar.step for event in kept if event.HasField("scalar")]
    assert len(steps) <= 100
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 10_000)
    gaps = {after - before for before, after in itertools.pairwise(steps[:-1])}
    assert len(steps) > 50
    assert len(gaps) == 1  # the whole of it, evenly
    assert len(kept[0].log.message) == job_history.MAX_TEXT
    assert [report.step for report in history.last_reports()] == [10_000]


def test_an_event_is_kept_once_and_a_watcher_may_know_some() -> None:
    first = JobHistory()
    first.add([JobEvent(log=LogRecord(message="a")), JobEvent(scalar=Scalar(name="loss", step=1, value=3.0))])
    first.add([JobEvent(log=LogRecord(message="b"))])
    told = first.kept(KINDS)
    assert [event.number for event in told] == [1, 1, 2]
    second = JobHistory()
    second.add(told[:1])

    async def watched() -> list[JobEvent]:
        watcher = second.watch(("log",), after=1)
        second.add(told)
        second.add(told)
        second.add([JobEvent(number=2**64 - 1, log=LogRecord(message="a lie")), JobEvent()])
        second.end(management_pb2.JobReport(phase=management_pb2.JOB_PHASE_FAILED, message="why"))
        return [event async for batch in watcher.batches() for event in batch]

    assert [(event.number, event.log.message) for event in asyncio.run(watched())] == [(2, "b"), (3, "why")]
    assert second.kept(KINDS)[:3] == told


def test_a_slow_watcher_is_dropped_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_history, "MAX_BEHIND", 3)
    history = JobHistory()

    async def watch() -> None:
        slow, other = history.watch(KINDS), history.watch(("scalar",))
        for _ in range(5):
            history.add([JobEvent(log=LogRecord(message="m"))])
        history.add([JobEvent(scalar=Scalar(name="loss", step=1))])
        history.end(management_pb2.JobReport(phase=management_pb2.JOB_PHASE_SUCCEEDED))
        with pytest.raises(TooSlow):
            [batch async for batch in slow.batches()]
        assert [[event.scalar.step for event in batch] async for batch in other.batches()] == [[1]]
        late = history.watch(KINDS)
        assert [len(batch) async for batch in late.batches()] == [6]

    asyncio.run(watch())


def test_numbers_are_read_in_any_type_and_not_too_often() -> None:
    def output(name: str, element_type: "plan_pb2.ElementType.ValueType", *shape: int) -> plan_pb2.Output:
        return plan_pb2.Output(name=name, type=plan_pb2.TensorType(element_type=element_type, shape=shape))

    outputs = [
        output("loss", plan_pb2.ELEMENT_TYPE_BFLOAT16),
        output("logits", plan_pb2.ELEMENT_TYPE_FLOAT32, 2),
        output("count", plan_pb2.ELEMENT_TYPE_INT64, 1, 1),
    ]
    seen: list[tuple[int, dict[str, float]]] = []
    sampler = ScalarSampler(outputs, 1000, lambda step, values: seen.append((step, dict(values))))
    for step in range(1, 1001):
        sampler.sample(step, [b"\x80\x3f", bytes(8), step.to_bytes(8, "little")])
    assert seen[0] == (1, {"loss": 1.0, "count": 1.0})
    assert seen[-1] == (1000, {"loss": 1.0, "count": 1000.0})
    assert len(seen) < 10
