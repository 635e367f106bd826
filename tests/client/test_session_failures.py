"""Executions that fail: closures, interrupts, the cluster, the compile, the batch."""

import re
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from fake_cluster import FakeCluster, until
from halved_weight import Setup, run

import cstorch
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import (
    ClusterUnreachableError,
    CompileError,
    ConfigurationError,
    InputError,
    NodeLostError,
    StateError,
    VersionMismatchError,
)
from waferbox import deadlines
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import node_pb2


def test_an_exception_of_a_closure_reaches_the_script_whose_end_cancels_the_job(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    setup = Setup(cluster, tmp_path)

    @cstorch.step_closure
    def check(loss: torch.Tensor) -> None:
        if loss.item() == 2.0:
            raise ValueError("the loss is NaN")

    with pytest.raises(ValueError, match="the loss is NaN"):
        run(setup.executor(5), lambda batch: check(setup.step(batch)))
    assert setup.weight() == 0.25  # that of the step of the closure
    with pytest.raises(ValueError, match="the loss is NaN"):
        run(setup.executor(5), lambda batch: check(setup.step(batch)))
    setup.backend.close()
    assert cluster.cancelled == ["job-1"]
    assert cluster.sessions_ended.wait(5)


def test_the_end_of_an_interrupted_script_cancels_the_job(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)

    def interrupted() -> None:
        for batch in setup.executor(20):
            setup.step(batch)
            if cluster.steps_run:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    setup.backend.close()
    assert cluster.cancelled == ["job-1"]
    assert cluster.finished == [True]


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (
            node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node="wafer-1", message="wafer-1 (pid 7) died"),
            NodeLostError,
            "^wafer-1 .pid 7. died",
        ),
        (
            node_pb2.Failure(
                kind=node_pb2.Failure.KIND_INPUT,
                node="worker-0",
                message="the input_fn raised KeyError: 'x'",
                traceback="Traceback:\n  File train.py",
            ),
            InputError,
            "(?s)KeyError.*traceback of the worker.*train.py",
        ),
    ],
)
def test_failures_of_the_cluster_become_exceptions(
    cluster: FakeCluster, tmp_path: Path, failure: node_pb2.Failure, error: type[Exception], message: str
) -> None:
    setup = Setup(cluster, tmp_path)
    cluster.fail_at = (3, failure)
    report = cstorch.step_closure(lambda loss: None)
    with pytest.raises(error, match=message):
        run(setup.executor(5), lambda batch: report(setup.step(batch)))


def test_a_loop_that_is_left_after_the_job_has_ended_says_why(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(cluster, tmp_path)
    failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, node="wafer-0", message="wafer-0 (pid 7) died")

    @cstorch.step_closure
    def lose_the_job() -> None:
        cluster.sessions[0].put(failure)
        assert session is not None
        job = session.job()
        until(lambda: not job.alive)
        executor.stop()

    executor = setup.executor(20)
    session = setup.backend.target().session
    for batch in executor:
        setup.step(batch)
        lose_the_job()
    assert "The loop was left after step 1 of 20, when the job had ended: wafer-0 (pid 7) died" in caplog.text
    for _ in range(2):
        with pytest.raises(StateError, match=r"the job ended in the execution that changed it: wafer-0 \(pid 7\) died"):
            setup.weight()


def test_states_of_a_job_that_ended_between_two_executions_are_lost_for_its_cause(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), lambda batch: setup.step(batch))
    session = setup.backend.target().session
    assert session is not None
    job = session.job()
    cluster.sessions[0].put(node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message="memoryx-0 (pid 7) died"))
    until(lambda: not job.alive)
    with pytest.raises(StateError, match=r"the job that held it has ended: memoryx-0 \(pid 7\) died"):
        run(setup.executor(1), lambda batch: setup.step(batch))


def test_a_compile_error_and_a_version_mismatch(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    cluster.refuse_job = (grpc.StatusCode.FAILED_PRECONDITION, "the cluster has version 9.9")
    with pytest.raises(VersionMismatchError, match=rf"9\.9.*{re.escape(WIRE_VERSION)}.*: install the same"):
        run(setup.executor(1), lambda batch: setup.step(batch))
    cluster.refuse_job = None
    cluster.refuse_compile = (grpc.StatusCode.INVALID_ARGUMENT, "no rule for aten.foo at train.py:3")
    with pytest.raises(CompileError, match=r"train.py:3"):
        run(setup.executor(1), lambda batch: setup.step(batch))


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend says so, before the script has built its model."""
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, connect=0.2))
    config = ClusterConfig(mgmt_address="127.0.0.1:1")
    began = time.monotonic()
    with pytest.raises(ClusterUnreachableError, match=r"no management service answers at 127\.0\.0\.1:1.*mgmt_address"):
        cstorch.backend("CSX", artifact_dir=tmp_path, cluster_config=config)
    assert time.monotonic() - began < 2
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", "127.0.0.1:2")
    with pytest.raises(ClusterUnreachableError, match=r"127\.0\.0\.1:2.*environment variable WAFERBOX_MANAGEMENT"):
        cstorch.backend("CSX", artifact_dir=tmp_path)
    cstorch.backend("CPU")  # what has failed is not the present backend


def test_a_session_that_is_not_answered_is_given_up(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, opened=0.3))
    setup = Setup(cluster, tmp_path)
    cluster.opens = False
    with pytest.raises(ClusterUnreachableError, match=r"coordinator of job-1 at .* has not opened the session within"):
        run(setup.executor(1), lambda batch: setup.step(batch))
    cluster.opens = True
    run(setup.executor(1), lambda batch: setup.step(batch))
    assert len(cluster.created) == 2


def test_a_batch_that_does_not_divide(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path, num_csx=3)
    with pytest.raises(ConfigurationError, match=r"batch of 4 rows.*num_csx=3"):
        run(setup.executor(1), lambda batch: setup.step(batch))
