"""The file of finished jobs: what outlives the cluster, within limits, and never at the cost of the cluster."""

import os
import sqlite3
import time
import zlib
from pathlib import Path

import pytest

from appliance import finished_jobs
from appliance.finished_jobs import FILE, FinishedJobs
from wsc.v1 import management_pb2, observation_pb2


def job(name: str, ended: float = 1.0) -> management_pb2.JobInfo:
    phase = management_pb2.JOB_PHASE_SUCCEEDED
    return management_pb2.JobInfo(job=name, phase=phase, ended=ended, user="ada", command=["/train.py"])


def log(number: int, message: str = "so") -> observation_pb2.JobEvent:
    return observation_pb2.JobEvent(number=number, log=observation_pb2.LogRecord(message=message))


def scalar(step: int) -> observation_pb2.JobEvent:
    return observation_pb2.JobEvent(number=step, scalar=observation_pb2.Scalar(name="loss", step=step, value=0.5))


def names(finished: FinishedJobs) -> list[str]:
    return [job.job for job in finished.jobs()]


def change(path: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(path) as file:
        file.execute(statement, values)
    file.close()


@pytest.fixture
def finished(tmp_path: Path) -> FinishedJobs:
    return FinishedJobs(tmp_path)


def test_without_a_file_there_are_no_jobs_and_none_is_made(finished: FinishedJobs, tmp_path: Path) -> None:
    assert finished.jobs() == ()
    assert not finished.events("job-1").events
    assert not list(tmp_path.iterdir())


def test_jobs_outlive_their_cluster(finished: FinishedJobs, tmp_path: Path) -> None:
    events = [log(1), scalar(1), scalar(2), log(2, "end")]
    finished.add(job("job-1", ended=5.0), events)
    finished.add(job("job-2", ended=9.0), [])
    finished.add(job("job-3", ended=7.0), [])
    later = FinishedJobs(tmp_path)
    assert names(later) == ["job-2", "job-3", "job-1"]
    expected = job("job-1", ended=5.0)
    expected.stored = True
    assert later.jobs()[-1] == expected
    assert list(later.events("job-1").events) == events
    assert not later.events("job-2").events
    assert not later.events("job-9").events
    assert os.stat(tmp_path / FILE).st_mode & 0o777 == 0o600


def test_a_reader_sees_what_another_process_adds(finished: FinishedJobs, tmp_path: Path) -> None:
    finished.add(job("job-1"), [])
    reader = FinishedJobs(tmp_path)
    assert names(reader) == ["job-1"]
    assert reader.jobs() is reader.jobs()  # nothing is read again that has not changed
    finished.add(job("job-2", ended=2.0), [log(1, "x" * 10_000)])
    os.utime(tmp_path / FILE, ns=(time.time_ns(), time.time_ns()))  # coarse clocks of file systems
    assert names(reader) == ["job-2", "job-1"]


def test_a_reader_does_not_disturb_the_process_that_adds_the_first_job(
    finished: FinishedJobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FinishedJobs(tmp_path)._opened(create=True):
        assert not finished.jobs()
        assert not finished.events("job-1").events
    assert not finished.jobs()
    assert not caplog.text


def test_the_oldest_jobs_are_removed(finished: FinishedJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished_jobs, "MAX_JOBS", 3)
    for number in (1, 4, 2, 3):
        finished.add(job(f"job-{number}", ended=float(number)), [])
    assert names(finished) == ["job-4", "job-3", "job-2"]
    monkeypatch.setattr(finished_jobs, "MAX_BYTES", 4000)
    finished.add(job("job-5", ended=5.0), [log(1, os.urandom(2500).hex())])
    finished.add(job("job-6", ended=6.0), [log(1, os.urandom(2500).hex())])
    assert names(finished) == ["job-6"]


def test_the_newest_events_of_a_job_are_kept(finished: FinishedJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(finished_jobs.MAX_KIND_BYTES, "log", 5000)
    finished.add(job("job-1"), [scalar(1), *(log(number, "x" * 1000) for number in range(1, 100)), scalar(2)])
    kept = finished.events("job-1").events
    assert [event.number for event in kept] == [1, 95, 96, 97, 98, 99, 2]


def test_a_stored_job_does_not_fill_the_memory(finished: FinishedJobs, tmp_path: Path) -> None:
    finished.add(job("job-1"), [])
    change(tmp_path / FILE, "UPDATE jobs SET events = ?", zlib.compress(bytes(1 << 30), 9)[:2_000_000])
    assert not finished.events("job-1").events


@pytest.mark.parametrize("damage", ["bytes", "schema", "mode", "symlink", "folder", "event", "lock"])
def test_a_bad_file_is_reported_once_and_harms_nothing(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILE
    FinishedJobs(tmp_path).add(job("job-1"), [log(1)])
    lock = sqlite3.connect(path, isolation_level=None)
    match damage:
        case "bytes":
            path.write_bytes(b"no database" * 1000)
        case "schema":
            change(path, "PRAGMA user_version = 7")
        case "mode":
            path.chmod(0o644)
        case "symlink":
            path.rename(tmp_path / "other")
            path.symlink_to("other")
        case "folder":
            path.unlink()
            path.mkdir()
        case "event":
            change(path, "UPDATE jobs SET events = x'ffff'")
        case "lock":
            monkeypatch.setattr(finished_jobs, "LOCK_SECONDS", 0.05)
            lock.execute("BEGIN EXCLUSIVE")
    before = path.read_bytes() if path.is_file() else b""
    finished = FinishedJobs(tmp_path)
    if damage != "event":
        assert finished.jobs() == ()
        finished.add(job("job-2"), [])
        assert (path.read_bytes() if path.is_file() else b"") == before
    assert not finished.events("job-1").events
    lock.close()
    assert caplog.text.count("Finished jobs are not kept beyond the cluster") == 1
    assert str(path) in caplog.text


@pytest.mark.parametrize("info", [b"", b"\xff\xff", management_pb2.JobInfo(job="job-2").SerializeToString()])
def test_a_row_that_is_no_ended_job_is_skipped(finished: FinishedJobs, tmp_path: Path, info: bytes) -> None:
    finished.add(job("job-1"), [])
    change(tmp_path / FILE, "INSERT INTO jobs VALUES ('job-2', 2.0, ?, x'')", info)
    assert names(finished) == ["job-1"]
