"""The commands for jobs, against a management service of our own."""

import http.server
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_management import FakeManagement, job, log, node
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from terminal import on_terminal
from typer.testing import CliRunner, Result

from waferbox.commands import top
from waferbox.commands.cli import app
from waferbox.commands.top import JobMetrics
from waferbox.output.console import as_data
from waferbox.output.tables import jobs_table
from wsc.v1 import management_pb2, node_pb2, observation_pb2

RUNNING, QUEUED, FAILED = "job-1a2b3c4d", "job-1affffff", "job-00000000"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeManagement]:
    fake = FakeManagement()
    grpc_server = fake.serve()
    yield fake
    fake.over.set()
    grpc_server.stop(None).wait(5.0)


@pytest.fixture
def fake(server: FakeManagement, monkeypatch: pytest.MonkeyPatch) -> FakeManagement:
    """Three jobs on two wafers: one runs, one waits, one has failed."""
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", server.address)
    wafer = node(0, node_pb2.ROLE_WAFER, RUNNING, "wafer-0")
    server.nodes = [node(1, node_pb2.ROLE_WAFER), wafer, node(2, node_pb2.ROLE_WORKER, RUNNING, "worker-0")]
    server.jobs = [
        job(RUNNING, "RUNNING", step=20, num_steps=400, labels=["team=x", "[red]=1"], nodes=[wafer], started=1e9 + 3),
        job(QUEUED, "QUEUED", queue_position=1, waiting_for=f"1 wafer, held by {RUNNING}"),
        job(FAILED, "FAILED", message="ValueError: no\x1b[2J\nmore of it", ended=1e9 + 60),
    ]
    server.events = [log("coordinator", "begun"), log("wafer-0", "slow", 30), log("worker-0", "a\x1b[2Jb\nc", 40)]
    server.requested = []
    server.over.clear()
    return server


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def shown(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    return result.stdout


def test_jobs_as_a_table(fake: FakeManagement) -> None:
    narrow, wide = shown("get", "jobs"), shown("get", "jobs", "-o", "wide")
    rows = {line.split()[0]: line for line in narrow.splitlines()[2:]}
    assert list(rows) == [RUNNING, QUEUED, FAILED]
    assert "20/400" in rows[RUNNING]
    assert "team=x [red]=1" in rows[RUNNING]
    assert "queued, place 1" in rows[QUEUED]
    assert "held by" not in narrow
    assert f"waits for 1 wafer, held by {RUNNING}" in wide
    assert "ValueError: no\\x1b[2J; more of it" in wide


def test_a_cause_of_several_lines_is_shown_whole(fake: FakeManagement) -> None:
    fake.jobs[-1].message = "lost nodes 2 times:\n  1. wafer-0 died\n\n  2. no link\nStart again"
    cause = "lost nodes 2 times: 1. wafer-0 died; 2. no link; Start again"
    assert cause in shown("get", "jobs", "-o", "wide")
    assert cause in call("logs", FAILED).stderr


def test_chosen_jobs(fake: FakeManagement) -> None:
    assert shown("get", "jobs", "1a2", "job-0").count("job-") == 2
    assert shown("get", "job", "-l", "team=x").count("job-") == 1
    none = call("get", "jobs", "-l", "team=y")
    assert (none.exit_code, none.stdout) == (0, "")
    assert "team=y" in none.stderr


def test_nothing_there_says_what_to_do(fake: FakeManagement) -> None:
    fake.jobs, fake.nodes = [], []
    assert f"WAFERBOX_MANAGEMENT={fake.address} python SCRIPT" in call("get", "jobs").stderr
    assert "python -m wafer" in call("get", "nodes").stderr
    assert json.loads(shown("get", "jobs", "-o", "json")) == {"jobs": []}
    assert yaml.safe_load(shown("get", "nodes", "-o", "yaml"))["nodes"] == []
    assert "no job is under way" in call("top").stderr
    assert "there are none" in call("cancel", "abc").stderr


def test_nodes_and_the_cluster(fake: FakeManagement) -> None:
    rows = [line.split() for line in shown("get", "nodes").splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        ["n0", "wafer", RUNNING],
        ["n1", "wafer", "free"],
        ["n2", "worker", RUNNING],
    ]
    wide = shown("get", "nodes", "-o", "wide")
    assert "127.0.0.1:7002" in wide
    assert "127.0.0.1:8002" in wide
    listed = json.loads(shown("get", "nodes", "-o", "json"))
    assert (listed["metrics"], listed["nodes"][-1]["metrics"]) == ("127.0.0.1:9999", "127.0.0.1:8002")
    cluster = json.loads(shown("get", "cluster", "-o", "json"))
    assert cluster["management"] == fake.address
    assert cluster["roles"][0] == {"role": "wafer", "nodes": 2, "free": 1}
    assert cluster["jobs"] == {"under_way": 2, "queued": 1, "ended": 1}
    summary = shown("get", "cluster")
    assert "2 under way (1 in the queue), 1 ended" in summary
    assert "Metrics of management: 127.0.0.1:9999" in summary
    assert RUNNING in shown("status")


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
JOBS = st.builds(
    management_pb2.JobInfo,
    job=st.integers(0, 2**32 - 1).map("job-{:08x}".format),
    phase=st.sampled_from(management_pb2.JobPhase.values()),
    message=TEXTS,
    age_seconds=st.floats(0, 1e9),
    labels=st.lists(TEXTS, max_size=3),
    step=st.integers(0, 2**64 - 1),
    num_steps=st.integers(0, 2**64 - 1),
    user=TEXTS,
    nodes=st.lists(
        st.builds(management_pb2.NodeInfo, node_id=st.just("n1"), role=st.just(node_pb2.ROLE_WAFER), address=TEXTS),
        max_size=2,
    ),
    created=st.floats(0, 4e9),
)


@settings(
    max_examples=15,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(jobs=[job(RUNNING, "RUNNING", labels=["\x85"], message="a\n\tb", step=2**63)])
@given(jobs=st.lists(JOBS, max_size=3))
def test_data_parse_and_hold_every_row(fake: FakeManagement, jobs: list[management_pb2.JobInfo]) -> None:
    fake.jobs = jobs
    for parse, form in ((json.loads, "json"), (yaml.safe_load, "yaml")):
        rows = parse(shown("get", "jobs", "-o", form))["jobs"]
        assert rows == [as_data(one) for one in jobs]
        assert [(row["job"], row["step"], row["message"], row["labels"]) for row in rows] == [
            (one.job, one.step, one.message, list(one.labels)) for one in jobs
        ]
    if jobs:
        assert shown("get", "jobs", "-o", "wide").count("\n") == 2 + len(jobs)


def test_a_job_described(fake: FakeManagement) -> None:
    facts = shown("describe", "job", "1a2b")
    assert "20/400" in facts
    assert "ada on earth" in facts
    assert "after 3 s" in facts
    assert "wafer-0" in facts
    assert "127.0.0.1:8000" in facts
    failed = shown("describe", "job", FAILED)
    assert "ValueError: no\\x1b[2J" in failed
    assert "more of it" in failed


def test_the_script_and_the_time_left_are_shown(fake: FakeManagement) -> None:
    assert "Left" not in shown("describe", "job", "1a2b")
    fake.jobs[0].seconds_left = 185.0
    fake.jobs[0].command.extend(["/train.py", "--name", "a \x1b[2J"])
    facts = shown("describe", "job", "1a2b")
    assert "3 min" in next(line for line in facts.splitlines() if "Left" in line)
    assert "/train.py --name 'a" in facts
    assert "\x1b" not in facts
    assert "3 min" in shown("get", "jobs", "-o", "wide")
    assert "about 3 min left" in shown("top", "1a2b")


def test_the_restarts_of_a_job_are_described(fake: FakeManagement) -> None:
    assert "Restarts" not in shown("describe", "job", "1a2b")
    restart = management_pb2.Restart(
        time=1e9, cause="wafer-0 (pid 7) died\x1b[2J", from_step=300, reached_step=317, seconds=1.25
    )
    fake.jobs[0].num_restarts = 24
    fake.jobs[0].restarts.append(restart)
    facts = shown("describe", "job", "1a2b")
    assert re.search(r"Restarts: +24", facts)
    assert re.search(r"300 +317 +1\.2 s +wafer-0 \(pid 7\) died", facts)
    assert "\x1b[2J" not in facts


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["describe", "job", "1a"], 3, f"may be {RUNNING} or {QUEUED}"),
        (["describe", "job", "job"], 3, "there is no job 'job'"),
        (["cancel", "job-"], 3, "there is no job 'job-'"),
        (["logs", "beef"], 3, f"the jobs are {RUNNING}, {QUEUED}, {FAILED}"),
        (["top"], 3, f"name one of {RUNNING}, {QUEUED}"),
        (["cancel", "0000"], 1, f"{FAILED} has ended before (failed)"),
        (["set-priority", RUNNING, "1"], 1, f"{RUNNING} has ended"),
        (["set-priority", RUNNING, "4"], 2, "PRIORITY"),
        (["set-priority", RUNNING, "p0"], 2, "1 (first) to 3, or p1 to p3"),
        (["label", RUNNING, "a"], 2, "KEY=VALUE"),
        (["label", RUNNING, "a b=1"], 2, "a label has no spaces"),
        (["label", RUNNING], 2, "Missing"),
        (["logs", RUNNING, "--role", "wafer-7"], 1, "it has some of coordinator, wafer-0, worker-0"),
        (["get", "jobs", "-o", "xml"], 2, "xml"),
    ],
)
def test_refusals_and_their_statuses(fake: FakeManagement, arguments: list[str], status: int, text: str) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert text in result.stderr
    assert fake.requested == []


def test_a_management_service_that_is_dead(fake: FakeManagement) -> None:
    result = call("cancel", "1a2b", "--management", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no management service answers at 127.0.0.1:1" in result.stderr


def test_another_server_is_no_management_service(fake: FakeManagement) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as page:
        thread = threading.Thread(target=page.serve_forever, args=(0.01,))
        thread.start()
        address = f"127.0.0.1:{page.server_port}"
        result = call("get", "jobs", "--management", address)
        page.shutdown()
        thread.join()
    assert result.exit_code == 1
    expected = f"what listens at {address} does not answer as a management service does: check the port, which"
    assert expected in result.stderr
    assert "the page has another" in result.stderr


def test_changes_are_told_in_one_line(fake: FakeManagement) -> None:
    assert shown("cancel", "1a2b") == f"{RUNNING} is cancelled (it was running at step 20/400)\n"
    assert shown("label", "1a2b", "a=1", "b=", "team-") == f"{RUNNING} has the labels a=1 b=\n"
    assert shown("label", "1a2b", "team-") == f"{RUNNING} has no labels\n"
    assert fake.requested[:2] == [
        management_pb2.CancelJobRequest(job=RUNNING),
        management_pb2.LabelJobRequest(job=RUNNING, add=["a=1", "b="], remove=["team"]),
    ]
    assert shown("set-priority", "1af", "p3").startswith(f"{QUEUED} has priority 3 (it was 2)")
    assert shown("set-priority", "1af", "p2").startswith(f"{QUEUED} has priority 2 (it was 3)")
    assert shown("set-priority", "1af", "1") == f"{QUEUED} has priority 1 (it was 2); place 1 in the queue\n"


def test_logs_as_they_were_said_and_harmless(fake: FakeManagement) -> None:
    lines = shown("logs", "1a2b").splitlines()
    assert [line[13:] or line for line in lines] == [
        "coordinator INFO    begun",
        "wafer-0     WARNING slow",
        "worker-0    ERROR   a\\x1b[2Jb",
        "c",
    ]
    assert shown("logs", "1a2b", "--role", "wafer").splitlines() == lines[1:2]
    assert shown("logs", "1a2b", "--role", "worker-0").splitlines() == lines[2:]
    fake.over.set()
    assert shown("logs", "1a2b", "-f").splitlines() == lines
    fake.events = []
    assert "has no messages" in call("logs", "1a2b").stderr


def report(node: str, time: float, **fields: Any) -> observation_pb2.JobEvent:
    return observation_pb2.JobEvent(report=observation_pb2.NodeReport(node=node, time=time, **fields))


def reports(begin: float = 0.0) -> list[observation_pb2.JobEvent]:
    def at(time: float, steps: int, waited: float, received: int) -> list[observation_pb2.JobEvent]:
        spent = {"compute": steps / 20, "wait": waited}
        common = {"execution": 1, "step": steps, "memory_bytes": 250_000_000}
        busy = {"cpu_seconds": time / 2, "seconds": spent, "bytes": {"received": received}}
        return [
            report("worker-10", begin + time, **common),
            report("worker-2", begin + time, **common),
            report("wafer-0", begin + time, **busy, **common),
        ]

    return [*at(1.0, 10, 0.1, 1_000_000), *at(3.0, 34, 0.5, 9_000_000)]


def test_what_a_job_uses(fake: FakeManagement) -> None:
    loss = observation_pb2.Scalar(execution=1, step=30, name="loss", value=0.123456)
    fake.events = [*reports(), observation_pb2.JobEvent(scalar=loss)]
    picture = shown("top", "1a2b")
    first, _, header, _, *rows = picture.splitlines()
    assert first.split() == [RUNNING, "running", "step", "20/400", "12.0", "steps/s", "loss", "0.1235"]
    assert header.split()[:4] == ["process", "cores", "MB", "MB/s"]
    assert rows[0].split() == ["wafer-0", "0.50", "250", "4.0", "0.0", "12.0", "compute", "60%,", "wait", "20%"]
    assert [row.split()[0] for row in rows] == ["wafer-0", "worker-2", "worker-10"]
    fake.events = []
    assert "There are no reports yet" in shown("top", "1a2b")


def test_rates_are_of_one_epoch_and_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = JobMetrics()
    metrics.add(reports()[:3])
    assert [one.steps for one in metrics.nodes()] == [None] * 3
    metrics.add(reports()[3:])
    assert [one.steps for one in metrics.nodes()] == [12.0] * 3
    monkeypatch.setattr(top, "STALE_SECONDS", -1.0)
    assert [(one.steps, one.memory_bytes) for one in metrics.nodes()] == [(None, 250_000_000)] * 3
    monkeypatch.undo()
    # This wait began before the last report, and the work since then is not part of it.
    metrics.add([report("wafer-0", 4.0, step=40, seconds={"compute": 2.0, "wait": 9.0})])
    assert metrics.nodes()[0].shares == pytest.approx({"compute": 0.3, "wait": 0.7})
    metrics.add([report("wafer-0", 5.0, epoch=2, step=1)])
    assert metrics.nodes()[0].steps is None


@pytest.mark.cluster
@pytest.mark.parametrize(("arguments", "until"), [(["logs", "-f"], "slow"), (["top"], "wafer-0")])
def test_ctrl_c_ends_what_follows_a_job(fake: FakeManagement, arguments: list[str], until: str) -> None:
    fake.events += reports()
    status, text = on_terminal(*arguments, "1a2b", until=until)
    assert status == 130, text
    assert "Traceback" not in text


def test_top_ends_with_its_job(fake: FakeManagement, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.events = reports()
    fake.over.set()
    fake.jobs[0].phase = management_pb2.JOB_PHASE_SUCCEEDED
    screen = io.StringIO()
    monkeypatch.setattr(top, "output", Console(file=screen, force_terminal=True, width=80, height=24))
    assert call("top", "1a2b").stdout == f"{RUNNING} has ended (succeeded)\n"
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", screen.getvalue()))
    assert max(map(len, lines)) <= 80
    assert "compute 60%" in screen.getvalue()


@pytest.mark.cluster
def test_nobody_reads_on(fake: FakeManagement) -> None:
    fake.events *= 2000
    command = [sys.executable, "-m", "waferbox", "logs", "1a2b"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(10.0) == 141


def test_names_of_jobs_are_completed(fake: FakeManagement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(*words: str) -> list[str]:
        monkeypatch.setenv("_WAFERBOX_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(["waferbox", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return CliRunner().invoke(app, [], prog_name="waferbox").stdout.split()

    assert completed("logs", "job-1") == [RUNNING, QUEUED]
    assert completed("cancel", RUNNING, "job-0") == [FAILED]
    assert completed("describe", "j") == ["job"]
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", "127.0.0.1:1")
    assert completed("logs", "job-1") == []
    monkeypatch.delenv("WAFERBOX_MANAGEMENT")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert completed("logs", "job-1") == []


def test_a_narrow_terminal_folds_no_row_and_wide_rows_end_with_their_text(
    fake: FakeManagement, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.jobs[0].labels.append("purpose=" + "long" * 30)
    for command in (["get", "jobs", "-o", "wide"], ["get", "nodes", "-o", "wide"]):
        header, rule, *rows = shown(*command).splitlines()
        assert len(rule) == len(header)
        assert not [row for row in rows if row != row.rstrip()]
    for width in (80, 120):
        screen = io.StringIO()
        Console(file=screen, width=width).print(jobs_table(fake.jobs))
        lines = screen.getvalue().splitlines()
        assert len(lines) == 2 + len(fake.jobs)
        assert RUNNING in lines[2]
        assert "…" in lines[2]
        assert max(map(len, lines)) <= width
