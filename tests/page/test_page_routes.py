"""The page's routes and its events, from a source that tests write."""

import asyncio
import json
import math
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_rig import HOSTILE, FakeSource, lease, log, make_job, make_nodes, report, scalar, write_report
from starlette.testclient import TestClient

from appliance.finished_jobs import FinishedJobs
from appliance.job_history import TooSlow
from appliance.page import streams
from appliance.page.app import make_app
from appliance.page.stored_source import StoredSource
from wsc.v1 import management_pb2

JOB = "job-1f2e3d4c"


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def client(source: FakeSource) -> Iterator[TestClient]:
    with TestClient(make_app(source, asyncio.Event())) as client:
        yield client


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PERIOD_SECONDS", 0.01)


class Words(HTMLParser):
    """The text of a page; its tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text = " ".join(f"{self.text} {data}".split())


def parsed(stream: bytes) -> list[tuple[str, Any]]:
    """The events of a stream: their names and data."""
    events = []
    for block in stream.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "event" in fields:
            events.append((fields["event"], json.loads(fields["data"])))
    return events


def test_the_cluster_shows_nodes_queue_and_jobs(source: FakeSource, client: TestClient) -> None:
    source.node_list = make_nodes(wafers=3)
    lease(source.node_list[:2], JOB)
    running, waits = management_pb2.JOB_PHASE_RUNNING, management_pb2.JOB_PHASE_QUEUED
    source.job_list = [
        make_job("job-c", waits, queue_position=2, waiting_for="its turn, after job-b"),
        make_job("job-b", waits, queue_position=1, waiting_for=f"1 wafer, held by {JOB}"),
        make_job(JOB, running, step=1200, num_steps=4000, seconds_left=185.0),
        make_job("job-a", management_pb2.JOB_PHASE_FAILED, ended=time.time(), message="wafer-0 died\nat noon"),
    ]
    answer = client.get("/")
    words = Words(answer.text).text
    assert "free wafers 1 of 3" in words
    assert f"{JOB} running step 1,200 of 4,000, about 3 min left" in words
    assert words.index(f"job-b waits for 1 wafer, held by {JOB}") < words.index("job-c waits for its turn, after job-b")
    assert "job-a failed just now wafer-0 died; at noon ada from desk" in words
    assert "wafer-0001 wafer-1 of job-1f2e3d4c rack-2" in words
    assert "wafer-0002 free rack-1" in words
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")


def test_a_job_shows_its_state_and_its_compile_report(source: FakeSource, client: TestClient, tmp_path: Path) -> None:
    artifact = write_report(tmp_path / "artifact", ["embed", "h.0", "head"])
    nodes = lease(make_nodes(), JOB)
    source.job_list = [make_job(JOB, management_pb2.JOB_PHASE_RUNNING, nodes=nodes, artifacts=[artifact], step=3)]
    answer = client.get(f"/jobs/{JOB}")
    words = Words(answer.text)
    assert "64 rows over 2 wafers" in words.text
    assert "h.0 781 KiB 391 KiB 4 ms 200" in words.text
    assert "predicted step 9.7 ms" in words.text
    assert words.attributes.count(("class", "region c1")) == 1
    shown = client.get(f"/jobs/{JOB}/reports/0").text
    assert "Compile report" in shown
    ways = [value for name, value in Words(shown).attributes if name == "href"]
    assert ways == ["/", f"/jobs/{JOB}"]
    assert shown.index("<main>") < shown.index("<nav>") < shown.index("layers")


def test_the_measured_step_is_compared_with_the_predicted_one(
    source: FakeSource, client: TestClient, tmp_path: Path
) -> None:
    artifact = write_report(tmp_path / "artifact", ["embed", "head"])  # 7 ms of computing, in a step of 9.7 ms
    ended = management_pb2.JOB_PHASE_SUCCEEDED
    source.job_list = [make_job(JOB, ended, ended=1.0, artifacts=[artifact]), make_job("job-2", ended, ended=1.0)]
    for name in (JOB, "job-2"):  # 7 ms of computing, 3 ms of waiting and sending
        source.add_events(name, report("wafer-0", 50, 1.0), report("memoryx-0", 50, 1.0))

    def split(name: str) -> str:
        events = parsed(client.get(f"/jobs/{name}/events").content)
        shown = [data["split"] for kind, data in events if isinstance(data, dict) and "split" in data]
        return Words(str(shown[-1])).text

    text = split(JOB)
    assert "computing 7 ms 7 ms 0 s" in text
    assert "waiting for weights and input, sending gradients 2.7 ms 3 ms +300 µs" in text
    assert "the step 9.7 ms 10 ms +300 µs" in text
    assert "Predicted" not in split("job-2")  # without a compile report


def test_jobs_of_earlier_clusters_are_shown_as_such(tmp_path: Path) -> None:
    source, finished = FakeSource(), FinishedJobs(tmp_path)
    ended = management_pb2.JOB_PHASE_SUCCEEDED
    artifact = write_report(tmp_path / "artifact", ["embed", "head"])
    earlier = make_job("job-before", ended, ended=1e9, artifacts=[artifact], command=["/old.py"], message=HOSTILE)
    finished.add(earlier, [scalar(1, 0.5), log("wafer-0", 40, "no room"), report("wafer-0", 50, 1.0)])
    source.job_list = [make_job("job-now", ended, ended=2e9), make_job(JOB, management_pb2.JOB_PHASE_RUNNING)]
    finished.add(source.job_list[0], [])  # the cluster has it still
    with TestClient(make_app(StoredSource(source, finished), asyncio.Event())) as client:
        words = Words(client.get("/").text)
        assert "Earlier 1 job of earlier or other clusters of this user job-before succeeded" in words.text
        assert words.text.count("job-now") == 1
        assert "img" not in words.tags
        page = Words(client.get("/jobs/job-before").text)
        assert "stored at the end of the job" in page.text
        assert "embed" in page.text
        assert "stored at the end" not in Words(client.get("/jobs/job-now").text).text
        assert "job-before old.py (earlier)" in Words(client.get(f"/jobs/{JOB}").text).text
        events = parsed(client.get("/jobs/job-before/events").content)
        assert events[-1] == ("end", None)
        assert "no room" in str(dict(events)["log"])
        curves = parsed(client.get("/jobs/job-before/curves").content)
        assert curves == [("begin", None), ("scalars", [[1, "loss", 1, 0.5]]), ("end", None)]
        assert client.get("/jobs/job-before/reports/0").status_code == 200
        assert client.get("/jobs/job-x").status_code == 404


def test_the_command_line_of_a_job_is_shown(source: FakeSource, client: TestClient) -> None:
    command = ["/home/ada/train.py", "--name", "two words", HOSTILE]
    source.job_list = [make_job(JOB, management_pb2.JOB_PHASE_RUNNING, command=command)]
    job = Words(client.get(f"/jobs/{JOB}").text)
    assert "/home/ada/train.py --name 'two words' '</script><script>window.broken" in job.text
    assert "img" not in job.tags
    assert "train.py of ada from desk" in Words(client.get("/").text).text


def test_the_restarts_of_a_job_are_shown(source: FakeSource, client: TestClient) -> None:
    restart = management_pb2.Restart(
        time=1e9, cause="<b>wafer-0</b> died", from_step=300, reached_step=317, seconds=1.25
    )
    running = management_pb2.JOB_PHASE_RUNNING
    source.job_list = [make_job(JOB, running, num_steps=400, step=320, restarts=[restart], num_restarts=1)]
    words = Words(client.get(f"/jobs/{JOB}").text).text
    assert "1 restart" in words
    assert "<b>wafer-0</b> died" in words
    assert "300" in words
    assert "317" in words


def test_training_and_evaluation_are_both_shown_by_name(source: FakeSource, client: TestClient, tmp_path: Path) -> None:
    training = write_report(tmp_path / "training", ["embed", "head"])
    evaluation = write_report(tmp_path / "evaluation", ["h.eval"], backward_seconds=0)
    (tmp_path / "evaluation" / "report.html").write_text("of the evaluation")
    data = tmp_path / "evaluation" / "report.json"
    data.write_text(data.read_text().replace("0.0097", "0.002"))
    gone = str(tmp_path / "gone")
    job = make_job(JOB, management_pb2.JOB_PHASE_RUNNING, artifacts=[training, gone, evaluation])
    source.job_list = [job]
    page = client.get(f"/jobs/{JOB}").text
    words = Words(page)
    assert words.tags.count("h3") == 4
    assert words.text.index("Placement Training") < words.text.index("Evaluation") < words.text.index("Layers Training")
    assert words.text.index("embed") < words.text.index("h.eval")
    links = [value for name, value in words.attributes if name == "href" and "/reports/" in str(value)]
    assert links == [f"/jobs/{JOB}/reports/0", f"/jobs/{JOB}/reports/2"]
    assert client.get(str(links[1])).text == "of the evaluation"
    assert client.get(f"/jobs/{JOB}/reports/3").status_code == 404
    assert "predicted step 2 ms" in words.text  # of what runs
    job.phase, job.ended = management_pb2.JOB_PHASE_SUCCEEDED, 1.0
    assert "predicted step 9.7 ms" in Words(client.get(f"/jobs/{JOB}").text).text  # of what was trained


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"layers": 7, "totals": {}}', "[" * 5000])
def test_a_report_that_cannot_be_read_is_none(
    source: FakeSource, client: TestClient, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    source.job_list = [make_job(JOB, management_pb2.JOB_PHASE_RUNNING, artifacts=[str(tmp_path)])]
    assert "Nothing is compiled yet." in client.get(f"/jobs/{JOB}").text
    assert client.get(f"/jobs/{JOB}/reports/0").status_code == 404


def test_prometheus_is_told_whom_to_ask(source: FakeSource, client: TestClient) -> None:
    source.node_list = make_nodes(wafers=2)
    assert client.get("/targets").json() == []
    source.node_list[0].metrics, source.node_list[-1].metrics = "127.0.0.1:8001", "far:8002"
    assert client.get("/targets").json() == [
        {"targets": ["127.0.0.1:8001"], "labels": {"__meta_waferbox_role": "wafer"}},
        {"targets": ["far:8002"], "labels": {"__meta_waferbox_role": "worker"}},
    ]


def test_what_is_not_there_is_said(source: FakeSource, client: TestClient) -> None:
    for path in ("/jobs/job-x", "/jobs/job-x/events", "/jobs/%3Cb%3E", "/nowhere", "/static/../app.py"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "<b>" not in answer.text


def test_all_that_is_loaded_is_there_and_ours(source: FakeSource, client: TestClient) -> None:
    source.job_list = [make_job(JOB, management_pb2.JOB_PHASE_RUNNING)]
    for path in ("/", f"/jobs/{JOB}"):
        page = Words(client.get(path).text)
        loaded = [value for name, value in page.attributes if name in ("src", "href") and "/static/" in str(value)]
        assert len(loaded) >= 4
        for address in loaded:
            assert str(address).startswith("/static/")
            assert client.get(str(address)).status_code == 200
        assert not [name for name, _ in page.attributes if name == "style" or name.startswith("on")]


def test_only_known_names_of_the_host_are_answered(source: FakeSource) -> None:
    client = TestClient(make_app(source, asyncio.Event(), ("127.0.0.1", "localhost")), base_url="http://localhost:9")
    assert client.get("/").status_code == 200
    assert client.get("/", headers={"Host": "evil.example:9"}).status_code == 400


def test_hostile_names_stay_text(source: FakeSource, client: TestClient, tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "\u2215")  # a name with a slash has no address
    nodes = lease(make_nodes(), name)
    for node in nodes:
        node.host = node.address = node.node_id = node.member = HOSTILE
    ended = management_pb2.JOB_PHASE_FAILED
    source.node_list = nodes
    hostile = {"user": HOSTILE, "host": HOSTILE, "labels": [HOSTILE], "message": HOSTILE, "waiting_for": HOSTILE}
    artifact = write_report(tmp_path / "artifact", [HOSTILE])
    source.job_list = [
        make_job(name, ended, nodes=nodes, ended=1.0, artifacts=[artifact], **hostile),
        make_job(name, management_pb2.JOB_PHASE_QUEUED, queue_position=1, **hostile),
        make_job(name, management_pb2.JOB_PHASE_RUNNING, **hostile),
    ]
    bad_report = report("wafer-0", 3, 1.0)
    bad_report.report.node = HOSTILE
    bad_report.report.seconds[HOSTILE] = 0.5
    source.add_events(name, scalar(1, 0.5, HOSTILE), log(HOSTILE, 40, HOSTILE), bad_report)
    cluster, job = client.get("/").text, client.get(f"/jobs/{name}").text
    events = dict(parsed(client.get(f"/jobs/{name}/events").content))
    regions, rows = events["regions"], events["log"]
    assert isinstance(regions, dict)
    assert isinstance(rows, str)
    for text in (cluster, job, rows, *regions.values()):
        page = Words(text)
        assert "img" not in page.tags
        assert "onerror" not in dict(page.attributes)
    assert Words(rows).text.count("window.broken=1") == 4  # the node and the message, each twice in HOSTILE
    assert Words(job).tags.count("script") == 3


def test_the_events_of_a_job(source: FakeSource, client: TestClient) -> None:
    ended = time.time()
    nodes = lease(make_nodes(), JOB)
    source.job_list = [
        make_job(JOB, management_pb2.JOB_PHASE_FAILED, ended=ended, nodes=nodes, message="wafer-1 died", step=100)
    ]
    source.add_events(JOB, scalar(1, 2.5), scalar(2, math.nan), scalar(1, 0.1, "accuracy", execution=2))
    source.add_events(
        JOB, log("wafer-0", 20, "begins"), log("wafer-1", 40, "no memory"), log("coordinator", 40, "ends")
    )
    source.add_events(JOB, report("wafer-0", 50, ended - 2), report("wafer-0", 100, ended - 1))
    events = parsed(client.get(f"/jobs/{JOB}/events").content)
    assert [events[0], events[-1]] == [("begin", None), ("end", None)]
    named = {name: data for name, data in events if name in ("scalars", "log")}
    assert named["scalars"] == [[1, "loss", 1, 2.5], [1, "loss", 2, None], [2, "accuracy", 1, 0.1]]
    rows = str(named["log"])
    assert Words(rows).text.count("first error") == 1
    assert rows.index("begins") < rows.index('id="first-error"') < rows.index("no memory") < rows.index("ends")
    shown: dict[str, str] = {}
    for name, data in events:
        if name == "regions":
            assert isinstance(data, dict)
            shown.update(data)
    assert "compute 7 ms 70 % send 1 ms 10 % stream wait 2 ms 20 %" in Words(shown["split"]).text
    assert "50 steps/s" in Words(shown["facts"]).text
    assert "failed wafer-1 died The first error in the log is wafer-1's" in Words(shown["phase"]).text
    assert "wafer-0 100 40 % 300 MiB 47.7 MiB/s" in Words(shown["members"]).text


def test_the_curves_of_a_job_are_sent_alone(source: FakeSource, client: TestClient) -> None:
    source.job_list = [make_job(JOB, management_pb2.JOB_PHASE_SUCCEEDED, ended=time.time())]
    source.add_events(JOB, scalar(1, 0.5, HOSTILE), log("wafer-0", 20, "so"), scalar(2, math.inf, HOSTILE))
    events = parsed(client.get(f"/jobs/{JOB}/curves").content)
    assert events == [("begin", None), ("scalars", [[1, HOSTILE, 1, 0.5], [1, HOSTILE, 2, None]]), ("end", None)]
    assert client.get("/jobs/job-0/curves").status_code == 404


def test_events_follow_what_happens(source: FakeSource) -> None:
    """Only what has changed is sent; the stream ends soon after closing is set."""

    async def watch() -> list[list[str]]:
        closing = asyncio.Event()
        source.node_list = make_nodes()
        stream = streams.cluster_stream(source, closing)
        sent = [(await anext(stream)), (await anext(stream))]
        source.job_list = [make_job(JOB, management_pb2.JOB_PHASE_QUEUED, queue_position=1)]
        sent.append(await anext(stream))
        closing.set()
        assert [event async for event in stream] == []
        return [sorted(data or ()) for _, data in parsed(b"".join(sent))]

    begin, first, second = asyncio.run(watch())
    assert (begin, first) == ([], ["nodes", "queue", "recent", "running", "stored", "summary"])
    assert second == ["queue", "summary"]


@pytest.mark.parametrize("ended", [0.0, 1.0])
def test_a_broken_stream_of_events_ends_without_the_end(source: FakeSource, ended: float) -> None:
    """Then the browser asks again."""

    async def events(name: str) -> object:
        raise TooSlow
        yield

    source.events = events  # type: ignore[assignment, method-assign]  # of this source alone
    phase = management_pb2.JOB_PHASE_FAILED if ended else management_pb2.JOB_PHASE_RUNNING
    source.job_list = [make_job(JOB, phase, ended=ended)]

    async def watch() -> list[str]:
        stream = streams.job_stream(source, JOB, asyncio.Event())
        return [name for name, _ in parsed(b"".join([event async for event in stream]))]

    names = asyncio.run(asyncio.wait_for(watch(), 5))
    assert names[0] == "begin"
    assert "end" not in names
