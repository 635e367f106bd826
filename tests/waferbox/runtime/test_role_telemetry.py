"""What a role says of itself beside its work: counters of the links, spans of traced steps, the outbox's manners."""

import asyncio
import logging
import threading
import urllib.request
from collections import defaultdict
from typing import Any

import pytest
from role_rig import FakeManagement
from small_plan import GRADIENT, WEIGHTS
from test_roles_training import MakeJob, make_job, write_states  # noqa: F401 - make_job is a fixture

from swarmx.swarmx_program import SwarmXJob
from waferbox import roles
from waferbox.runtime import outbox as outbox_module
from waferbox.runtime.node import Node, NodeSettings
from waferbox.runtime.outbox import MAX_EVENTS, MAX_MESSAGE_CHARACTERS, JobLogHandler, Outbox
from wsc.v1 import node_pb2, observation_pb2

SHARED_MEMORY = node_pb2.LANE_SHARED_MEMORY


def test_traced_steps_and_counted_bytes(make_job: MakeJob) -> None:  # noqa: F811
    job = make_job(SHARED_MEMORY, 2)
    job.load(1)
    for client in write_states(job):
        client.close()
    job.start(1, num_steps=9, activation_steps=1, run_ahead_steps=1)
    job.outputs(1)
    for node in job.nodes.all:
        node.send(trace=observation_pb2.Trace(epoch=1, first_step=6, num_steps=2))
        node.send(prepare_input=node_pb2.PrepareInput())  # is refused: by then the trace is under way
        assert node.expect("failed").failed.kind == node_pb2.Failure.KIND_INTERNAL
    for step in range(2, 10):
        job.outputs(step)
    whats: dict[str, dict[tuple[str, str], list[Any]]] = {}
    for node in job.nodes.all:
        spans = list(node.expect("spans").spans.spans)
        assert node.expect("spans").spans.last
        node.expect("finished")
        by_what: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for span in spans:
            assert span.node == node.name
            by_what[span.what, span.detail].append(span)
        whats[node.name] = by_what
    assert set(whats["wafer-0"]) == {
        ("wait", "batch"),
        ("wait", f"weights {WEIGHTS}"),
        ("send", "credit memoryx-0"),
        ("compute", "kernel 1"),
        *(("send", f"reduction {group}") for group in (GRADIENT, 3, 6)),
        ("send", "batch taken"),
    }
    assert set(whats["memoryx-0"]) >= {
        ("send", f"weights {WEIGHTS}"),
        ("update", "w0"),
        ("wait", f"reduction {GRADIENT}"),
    }
    assert ("reduce", f"reduction {GRADIENT}") in whats["swarmx-0"]
    for by_what in whats.values():
        assert {span.step for spans in by_what.values() for span in spans} == {6, 7}
    for wafer in ("wafer-0", "wafer-1"):
        first_updates = {span.step: span for span in reversed(whats["memoryx-0"]["update", "w0"])}  # it may have parts
        for compute in whats[wafer]["compute", "kernel 1"]:
            # The update of a step needs what the wafer computed in it, and the clocks agree on that.
            assert compute.begin + compute.seconds <= first_updates[compute.step].begin
    reports = {
        node.name: next(event.report for event in reversed(node.seen) if event.HasField("report"))
        for node in job.nodes.all
    }
    gradient = next(group.nbytes for group in job.plan.groups if group.id == GRADIENT)
    assert reports["swarmx-0"].bytes["received"] > 2 * 9 * gradient
    assert reports["memoryx-0"].bytes["received"] == 9 * gradient


def test_a_trace_of_no_running_execution_ends_at_once(make_job: MakeJob) -> None:  # noqa: F811
    (wafer,) = make_job(SHARED_MEMORY).nodes.wafers
    wafer.send(trace=observation_pb2.Trace(epoch=1, first_step=1, num_steps=5))
    answer = wafer.expect("spans").spans
    assert answer.last
    assert not answer.spans


def record(number: int, level: int = logging.INFO) -> observation_pb2.LogRecord:
    return observation_pb2.LogRecord(node="n", time=number, level=level, message=str(number))


def test_the_outbox_keeps_answers_and_drops_the_oldest_records(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        monkeypatch.setattr(outbox_module, "BATCH_SECONDS", 0.05)
        box = Outbox()
        box.open("n", lambda: observation_pb2.NodeReport(node="n", step=3), lambda: None)
        for number in range(MAX_EVENTS + 5):
            box.log(record(number))
            box.put(node_pb2.AttachResponse(snapshot=node_pb2.Snapshot(step=number)))
        box.put(node_pb2.AttachResponse(finished=node_pb2.Finished(epoch=1)))
        sent = box.responses()
        events = (await anext(sent)).events.events
        assert events[0].log.message == "5 records were dropped, since they were made too fast"
        assert [event.log.message for event in events[1:-1]] == [str(n) for n in range(5, MAX_EVENTS + 5)]
        assert events[-1].report.step == 3  # before the word of the end
        assert [(await anext(sent)).snapshot.step for _ in range(MAX_EVENTS + 5)] == list(range(MAX_EVENTS + 5))
        assert (await anext(sent)).HasField("finished")
        box.log(record(1, logging.ERROR))  # does not wait for others
        assert (await anext(sent)).events.events[0].log.message == "1"
        box.log(record(2))
        assert [event.WhichOneof("kind") for event in (await anext(sent)).events.events] in (
            ["log", "report"],
            ["report"],
        )
        box.log(record(3))
        box.close()
        rest = [
            event.log.message async for response in sent for event in response.events.events if event.HasField("log")
        ]
        assert rest[-1] == "3"

    asyncio.run(check())


def test_what_is_logged_while_a_job_is_there() -> None:
    taken: list[observation_pb2.LogRecord] = []
    logger = logging.getLogger("wafer.test")
    with JobLogHandler("wafer-3", taken.append):
        logger.warning("%d %s", 1, "x" * MAX_MESSAGE_CHARACTERS)
        try:
            raise KeyError("a defect")
        except KeyError:
            thread = threading.Thread(target=logger.exception, args=("it broke",))
            logger.exception("it broke")
        thread.start()
        thread.join()
    logger.warning("nobody hears this")
    assert len(taken) == 3
    first, second, _ = taken
    assert (first.node, first.level, first.logger) == ("wafer-3", logging.WARNING, "wafer.test")
    assert len(first.message) == MAX_MESSAGE_CHARACTERS + 1
    assert second.message.startswith("it broke\nTraceback")
    assert "KeyError: 'a defect'" in second.message


def test_a_node_serves_its_figures_where_it_is_told_to() -> None:
    management = FakeManagement()
    settings = NodeSettings(management=management.address, metrics_port=0)
    node = Node(roles.SWARMX, settings, SwarmXJob)
    try:
        assert node._metrics is not None
        address = f"http://{node._metrics.address}/metrics"
        with urllib.request.urlopen(address, timeout=10) as response:
            assert b'waferbox_running{role="swarmx"} 0.0' in response.read()
    finally:
        node.start()
        node.close()
        management.close()
