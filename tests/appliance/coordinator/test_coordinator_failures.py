"""How jobs end before their time: who is named, how soon, and that nothing is left."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from cluster_in_process import Client, ClusterInProcess, fake_compile, kinds, run

from appliance.coordinator.execution.failures import Verdict
from appliance.coordinator.reporting import JobReporter
from waferbox import deadlines
from waferbox.links.link import LinkLost
from waferbox.runtime.node_job import JobContext, JobFailure
from waferbox.runtime.role_job import report_failure
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, plan_pb2

FULL = {"memoryx": 1, "swarmx": 1, "wafer": 2, "workers": 2}
ENDLESS = 1000  # steps: nobody takes their outputs, so the execution stays where it is
Failure = node_pb2.Failure


def started(client: Callable[..., Client], **settings: Any) -> Client:
    """A job with an endless execution under way."""
    one = client(num_csx=2, **settings)
    one.compile()
    one.begin(ENDLESS)
    one.start()
    assert one.receive_outputs().step == 1
    return one


def last(one: Client) -> Any:
    """The last response of the execution."""
    response = None
    for response in one.call:  # noqa: B007
        pass
    return response


def ends_as(cluster: ClusterInProcess, phase: int, free: int) -> management_pb2.JobInfo:
    cluster.until(lambda: cluster.jobs()[0].phase == phase)
    cluster.until(lambda: cluster.free_nodes() == free)
    return cluster.jobs()[0]


@pytest.mark.parametrize(("index", "name"), [(0, "memoryx-0"), (1, "swarmx-0"), (3, "wafer-1"), (4, "worker-0")])
def test_the_death_of_a_node_fails_the_job_and_names_it(
    cluster: ClusterInProcess, client: Callable[..., Client], index: int, name: str
) -> None:
    cluster.add(**FULL)
    one = started(client)
    begin = time.monotonic()
    cluster.kill(index)
    failure = one.failure()
    assert time.monotonic() - begin < 3
    assert (failure.kind, failure.node) == (Failure.KIND_NODE, name)
    assert f"{name} (pid " in failure.message
    assert last(one).failed == failure
    assert name in ends_as(cluster, management_pb2.JOB_PHASE_FAILED, 5).message


def test_a_lost_link_is_blamed_on_the_peer_that_died(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**FULL)

    def lose(context: JobContext, step: int) -> None:
        cluster.kill(3)
        report_failure(context, JobFailure(Failure.KIND_NODE, "the link to wafer-1 is lost", peer="wafer-1"))

    cluster.behaviour.on_step["wafer-0"] = lose
    one = client(num_csx=2)
    one.compile()
    one.begin(1)
    one.start()
    assert one.failure().node == "wafer-1"


def test_a_lost_link_is_the_reason_if_nobody_died(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**FULL)

    def lose(context: JobContext, step: int) -> None:
        raise LinkLost("swarmx-0", "a frame was damaged")

    cluster.behaviour.on_step["wafer-0"] = lose
    one = client(num_csx=2)
    one.compile()
    one.begin(ENDLESS)
    one.start()
    failure = one.failure()
    assert (failure.node, failure.peer) == ("wafer-0", "swarmx-0")
    assert "damaged" in failure.message


@pytest.mark.parametrize("where", ["on_step", "on_load"])
def test_what_a_role_reports_reaches_the_client(
    cluster: ClusterInProcess, client: Callable[..., Client], where: str
) -> None:
    cluster.add(**FULL)

    def fail(context: JobContext, step: int = 0) -> None:
        raise JobFailure(Failure.KIND_INPUT, "input_fn raised ValueError: no file", traceback="Traceback ...")

    getattr(cluster.behaviour, where)["worker-1"] = fail
    one = client(num_csx=2)
    one.compile()
    one.begin(ENDLESS)
    if where == "on_step":
        one.start()
    failure = one.failure()
    assert (failure.kind, failure.node, failure.traceback) == (Failure.KIND_INPUT, "worker-1", "Traceback ...")
    assert last(one).failed == failure
    ends_as(cluster, management_pb2.JOB_PHASE_FAILED, 6)


def hold_before(cluster: ClusterInProcess, step: int) -> None:
    """Holds all nodes before a step for which a worker has no batch."""
    for name in ("memoryx-0", "swarmx-0", "wafer-0", "wafer-1"):
        cluster.behaviour.may_begin[name] = lambda begun: begun < step


def test_a_loader_that_is_killed_at_the_same_batch_again_has_no_such_batch(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    """The first time the job recovers, as memory may have been short."""
    cluster.add(**FULL)
    killed: list[int] = []

    def kill(context: JobContext, step: int) -> None:
        if step == 5:
            killed.append(step)
            failure = JobFailure(Failure.KIND_NODE, "a process of the loader was killed")
            failure.step = step
            raise failure

    cluster.behaviour.on_step["worker-1"] = kill
    hold_before(cluster, 5)
    one = client(num_csx=2, max_num_restarts=3)
    one.compile()
    one.begin(ENDLESS)
    one.start()
    for step in range(1, 5):
        assert one.receive_outputs().step == step
        one.consumed(step)
    failed = one.receive("input_failed").input_failed
    assert (failed.kind, failed.node, failed.step) == (Failure.KIND_INPUT, "worker-1", 5)
    assert killed == [5, 5]
    cluster.until(lambda: cluster.jobs()[0].num_restarts == 1)
    one.send(stop_after=coordinator_pb2.StopAfter(step=4))
    one.receive("finished")
    one.close()
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_SUCCEEDED)


def test_the_results_before_a_bad_batch_come_though_the_job_cannot_recover(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)

    def fail(context: JobContext, step: int) -> None:
        if step == 5:
            failure = JobFailure(Failure.KIND_INPUT, "no picture")
            failure.step = step
            raise failure

    cluster.behaviour.on_step["worker-0"] = fail
    hold_before(cluster, 5)
    one = client(num_csx=2)
    one.compile()
    one.begin(ENDLESS, checkpoint_steps=(3,))
    one.start()
    for step in range(1, 5):
        assert one.receive_outputs().step == step
        if step == 3:
            assert one.receive("checkpoint").checkpoint.step == 3
        one.consumed(step)
    # The client may be reading the checkpoint, until it releases that.
    assert cluster.jobs()[0].phase != management_pb2.JOB_PHASE_FAILED
    one.send(checkpoint_released=coordinator_pb2.CheckpointReleased(step=3))
    assert last(one).failed.message == "no picture"
    ends_as(cluster, management_pb2.JOB_PHASE_FAILED, 6)


@pytest.mark.defects
def test_a_defect_in_a_role_comes_with_its_traceback(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**FULL)

    def fail(context: JobContext, step: int) -> None:
        raise ZeroDivisionError("oh")

    cluster.behaviour.on_step["memoryx-0"] = fail
    one = client(num_csx=2)
    one.compile()
    one.begin(10)
    one.start()
    failure = one.failure()
    assert (failure.kind, failure.node) == (Failure.KIND_INTERNAL, "memoryx-0")
    assert "ZeroDivisionError: oh" in failure.message
    assert "in fail" in failure.traceback


@pytest.mark.parametrize("when", ["idle", "running", "loading"])
def test_a_client_that_goes_away_ends_its_job(
    cluster: ClusterInProcess, client: Callable[..., Client], when: str
) -> None:
    cluster.add(**FULL)
    if when == "idle":
        one = client(num_csx=2)
        one.compile()
    elif when == "running":
        one = started(client)
    else:
        one = client(num_csx=2)
        one.compile()
        one.begin(1)
        one.receive("state_wanted")
    begin = time.monotonic()
    one.channel.close()  # as the end of its process does
    ends_as(cluster, management_pb2.JOB_PHASE_CANCELLED, 6)
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize("how", ["left", "vanished", "cancelled"])
def test_an_ended_job_has_the_step_that_its_script_has_reached(
    cluster: ClusterInProcess, client: Callable[..., Client], how: str
) -> None:
    cluster.add(**FULL)
    one = client(num_csx=2, max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    one.begin(ENDLESS)
    one.start()
    *_, step = one.consume(20)  # more than come before the coordinator has read that some are consumed
    if how == "left":
        one.send(stop_after=coordinator_pb2.StopAfter(step=step))
        last(one)
        one.close()
    elif how == "vanished":
        one.channel.close()
    else:
        cluster.stub.CancelJob(management_pb2.CancelJobRequest(job=one.created.job))
    phase = management_pb2.JOB_PHASE_SUCCEEDED if how == "left" else management_pb2.JOB_PHASE_CANCELLED
    job = ends_as(cluster, phase, 6)
    assert step - 4 <= job.step <= step if how != "left" else job.step == step
    assert job.num_steps == ENDLESS


def test_cancel_ends_a_job(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**FULL)
    one = started(client)
    cluster.stub.CancelJob(management_pb2.CancelJobRequest(job=one.created.job))
    assert one.failure().kind == Failure.KIND_CANCELLED
    assert last(one).failed.kind == Failure.KIND_CANCELLED
    ends_as(cluster, management_pb2.JOB_PHASE_CANCELLED, 6)
    cluster.stub.CancelJob(management_pb2.CancelJobRequest(job=one.created.job))  # no harm
    with pytest.raises(grpc.RpcError) as caught:
        cluster.stub.CancelJob(management_pb2.CancelJobRequest(job="job-unknown"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_script_that_cancels_its_job_has_not_succeeded(
    cluster: ClusterInProcess, client: Callable[..., Client], cancelled: bool
) -> None:
    """Its session may end before management tells the coordinator that the job is cancelled."""
    cluster.add(**FULL)
    one = started(client)
    one.close(cancelled=cancelled)
    ends_as(cluster, management_pb2.JOB_PHASE_CANCELLED if cancelled else management_pb2.JOB_PHASE_SUCCEEDED, 6)


@pytest.mark.parametrize("through_management", [True, False])
def test_the_exception_of_a_script_is_the_failure_of_its_job(
    cluster: ClusterInProcess, client: Callable[..., Client], through_management: bool
) -> None:
    cluster.add(**FULL)
    one = started(client)
    error = "ValueError: two\nlines " + "x" * 5000
    if through_management:
        cluster.stub.CancelJob(management_pb2.CancelJobRequest(job=one.created.job, by_script=True, error=error))
    one.close(cancelled=through_management, error="" if through_management else error)
    job = ends_as(cluster, management_pb2.JOB_PHASE_FAILED, 6)
    assert job.message.startswith("its script failed: ValueError: two; lines xx")
    assert len(job.message) < 1100


def test_a_missing_role_is_named_with_the_command_that_starts_one(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, missing_nodes=0.2, lost_nodes=0.2))
    cluster.add(memoryx=1, swarmx=1, workers=1)
    one = client()
    with pytest.raises(grpc.RpcError) as caught:
        one.compile()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    details = caught.value.details()
    assert details is not None
    assert f"python -m wafer --management {cluster.address}" in details
    assert "1 wafer" in details
    assert "worker" not in details
    failure = one.failure()
    assert failure.kind == Failure.KIND_USER
    assert failure.message == details


def test_a_role_that_comes_late_is_waited_for(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(memoryx=1, swarmx=1, workers=1)
    one = client()
    threading.Timer(0.3, lambda: cluster.add(wafer=1)).start()
    assert one.compile().artifact == "artifact-good"


def test_a_cluster_that_shuts_down_cancels_its_jobs(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**FULL)
    one = started(client)
    cluster.server.loop.run(cluster.service.close(end_jobs=True))
    assert one.failure().kind == Failure.KIND_CANCELLED


def test_the_first_reason_counts() -> None:
    reached: list[str] = []
    verdict = Verdict(lambda: reached.append("reached"))
    verdict.report(Failure(kind=Failure.KIND_INPUT, node="worker-0", message="input"))
    verdict.report(Failure(kind=Failure.KIND_NODE, node="wafer-1", message="death"))
    assert reached == ["reached"]
    assert verdict.failure is not None
    assert verdict.failure.node == "worker-0"


def test_long_and_foreign_messages_fit_in_a_status(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add(**FULL)
    one = client(num_csx=2)

    def fail(context: JobContext) -> None:
        raise JobFailure(Failure.KIND_INPUT, "é" * 100_000)

    cluster.behaviour.on_load["worker-1"] = fail
    one.compile()
    one.begin(1)
    assert len(one.failure().message) == 100_000
    with pytest.raises(grpc.RpcError) as caught:
        one.stub.Compile(coordinator_pb2.CompileRequest(token=one.created.token, cirh="good"), timeout=5)
    assert caught.value.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)


def test_a_job_that_ends_while_a_step_is_compiled_says_so_at_once(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is answered; one that the end of its server cancels would be a traceback of gRPC in the log."""
    cluster.add(**FULL)
    one = client(num_csx=2)
    compiles, may_end = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> tuple[str, plan_pb2.Plan, bool]:
        compiles.set()
        assert may_end.wait(20)
        return fake_compile(*arguments)

    monkeypatch.setattr("cluster_in_process.fake_compile", slow)
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(one.compile)
        assert compiles.wait(20)
        cluster.stub.CancelJob(management_pb2.CancelJobRequest(job=one.created.job))
        with pytest.raises(grpc.RpcError) as caught:
            compiling.result(20)
        may_end.set()
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.ABORTED,
        f"{one.created.job} was cancelled",
    )


def test_phases_are_told_in_order_and_none_after_the_end() -> None:
    told: list[int] = []
    reporter = JobReporter(lambda report: told.append(report.phase))
    with reporter.compiling():
        assert told == [management_pb2.JOB_PHASE_COMPILING]
    reporter.end(management_pb2.JOB_PHASE_SUCCEEDED, "")
    reporter.phase(management_pb2.JOB_PHASE_IDLE)
    assert told == [
        management_pb2.JOB_PHASE_COMPILING,
        management_pb2.JOB_PHASE_IDLE,
        management_pb2.JOB_PHASE_SUCCEEDED,
    ]


def test_a_compile_that_fails_is_the_reason_for_the_end(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    """A script that fails closes its job in good order, like one that has done all its work."""
    cluster.add(**FULL)
    one = client()
    with pytest.raises(grpc.RpcError):
        one.compile("refuse")
    one.close()
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED)
    assert cluster.jobs()[0].message == "no rule for aten.foo, train.py:3"


@pytest.mark.parametrize("compiles", [True, False])
def test_a_script_that_goes_on_after_a_compile_that_failed_succeeds(
    cluster: ClusterInProcess, client: Callable[..., Client], compiles: bool
) -> None:
    """With another step, or with one that was compiled before."""
    cluster.add(**FULL)
    one = client()
    one.compile()
    with pytest.raises(grpc.RpcError):
        one.compile("defect")
    if compiles:
        one.compile()
    else:
        assert kinds(run(one, 1)) == ["outputs 1", "finished"]
    one.close()
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_SUCCEEDED)


def test_a_job_that_is_cancelled_after_a_compile_that_failed_is_cancelled(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)
    one = client()
    with pytest.raises(grpc.RpcError):
        one.compile("refuse")
    cluster.stub.CancelJob(management_pb2.CancelJobRequest(job=one.created.job), timeout=5)
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_CANCELLED)
