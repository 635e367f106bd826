"""A job goes on when its coordinator dies: another takes it up, and the script has what it has when nobody dies."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from cluster_in_process import ClusterInProcess

from appliance.coordinator import record, serving
from appliance.coordinator.process_host import ProcessHost
from appliance.coordinator.record import JobRecord
from appliance.coordinator.session import ClientSession
from appliance.ingress.process import Ingress, IngressSettings
from appliance.management import supervision
from cstorch._internal.session import job as session_job
from cstorch._internal.session.execution.stream import ExecutionStream
from cstorch._internal.session.job import ClientJob
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ClusterError, NodeLostError
from waferbox import deadlines, settings
from waferbox.rpc import vanished_hosts
from waferbox.runtime import outbox
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, plan_pb2

FULL = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}
NUM_STEPS = 40
OPTIONS = plan_pb2.CompileOptions()
INPUT = node_pb2.PrepareInput(loader="train", builder=b"anything")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.REPLACEMENT_SECONDS.name, "20")


class Script:
    """What a script does with its job."""

    def __init__(
        self, cluster: ClusterInProcess, artifact: str = "artifact-good", ingress: str = "", num_csx: int = 1
    ) -> None:
        self.cluster = cluster
        self.artifact = artifact
        self.job = ClientJob(ingress or cluster.address, ClusterConfig(run_ahead_steps=4, num_csx=num_csx), "")
        self.job.compile(artifact.removeprefix("artifact-"), OPTIONS)
        self.job.prepare_input(INPUT)
        self.stream: ExecutionStream
        self.losses: list[tuple[int, float]] = []

    def begin(self, num_steps: int, checkpoint_steps: tuple[int, ...] = ()) -> None:
        self.losses.clear()
        begin = coordinator_pb2.Begin(
            artifact=self.artifact,
            loader="train",
            num_steps=num_steps,
            activation_steps=1,
            checkpoint_steps=checkpoint_steps,
        )
        self.stream = ExecutionStream(self.job, begin)

    def send_states(self) -> coordinator_pb2.StateWanted:
        wanted = self.stream.receive("state_wanted").state_wanted
        self.answer(wanted, wrote=True)
        return wanted

    def answer(self, wanted: coordinator_pb2.StateWanted, *, wrote: bool) -> None:
        sent = coordinator_pb2.StateSent(attempt=wanted.attempt, wrote=wrote)
        self.stream.send(coordinator_pb2.ExecuteRequest(state_sent=sent))

    def start(self) -> None:
        self.send_states()
        self.stream.receive("started")

    def run(self, last_step: int) -> None:
        """Up to a step."""
        for step in range(len(self.losses) + 1, last_step + 1):
            outputs = self.stream.receive_outputs()
            self.losses.append((outputs.step, float(numpy.frombuffer(outputs.tensors[0], numpy.float32)[0])))
            self.stream.consumed(step)

    def take(self, step: int) -> None:
        taken = coordinator_pb2.CheckpointReleased(step=step)
        self.stream.send(coordinator_pb2.ExecuteRequest(checkpoint_released=taken))

    def finish(self, num_steps: int) -> None:
        self.run(num_steps)
        self.stream.receive("finished")
        self.stream.close()
        assert self.losses == [(step, float(step)) for step in range(1, num_steps + 1)]

    def kill_coordinator(self) -> None:
        """And wait until the script has another."""
        incarnation = self.job.session.connection.incarnation
        self.coordinator().kill()
        self.cluster.until(lambda: self.job.session.connection.incarnation > incarnation)

    def coordinator(self) -> Any:
        return self.cluster.coordinator(self.job.name)

    def info(self) -> management_pb2.JobInfo:
        info = self.cluster.service.describe_one(self.job.name)
        assert info is not None
        return info

    def close(self) -> None:
        self.job.close()


@pytest.fixture
def script(cluster: ClusterInProcess) -> Iterator[Callable[..., Script]]:
    scripts: list[Script] = []

    def make(**settings: Any) -> Script:
        scripts.append(Script(cluster, **settings))
        return scripts[-1]

    cluster.add(**FULL)
    yield make
    for one in scripts:
        one.close()


def hold(cluster: ClusterInProcess, step: int) -> threading.Event:
    """The sender of the wafers' outputs waits before this step; returns what lets it go on."""
    go = threading.Event()
    for sender in ("swarmx-0", "wafer-0"):
        cluster.behaviour.on_step[sender] = lambda _, at: go.wait(30) if at == step else None
    return go


def test_while_steps_run(cluster: ClusterInProcess, script: Callable[..., Script]) -> None:
    one = script()
    one.begin(NUM_STEPS)
    one.start()
    go = hold(cluster, 15)
    one.run(10)
    threading.Timer(0.3, go.set).start()
    one.kill_coordinator()
    one.finish(NUM_STEPS)
    assert len(cluster.behaviour.starts["wafer-0"]) == 2
    one.begin(5)
    one.start()
    one.finish(5)


def test_whose_management_had_been_started_anew(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, retry=0.05))
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, retry=0.05))
    one = script()
    one.begin(NUM_STEPS)
    one.start()
    go = hold(cluster, 15)
    one.run(10)
    coordinator, address = one.coordinator(), cluster.address
    cluster.stop_management()
    cluster.start_management(address)
    cluster.until(lambda: cluster.jobs())
    cluster.wait_for_nodes(4)
    coordinator.kill()
    cluster.until(lambda: one.job.session.connection.incarnation)
    go.set()
    one.finish(NUM_STEPS)
    causes = [restart.cause for restart in one.info().restarts]
    assert causes == [f"the coordinator of {one.job.name} died, and another has taken over the job"]


@pytest.mark.parametrize("before", [True, False])
def test_with_its_management(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """The coordinator dies before another management service is there, or when it is, and has not heard of the job."""
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, retry=0.05))
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, retry=20.0))
    one = script()
    one.begin(NUM_STEPS)
    one.start()
    go = hold(cluster, 15)
    one.run(10)
    coordinator, address = one.coordinator(), cluster.address
    cluster.stop_management()
    if before:
        coordinator.kill()
        coordinator._child.wait(10.0)
    cluster.start_management(address)
    if before:
        cluster.until(cluster.jobs)
    else:
        assert not cluster.jobs()
        coordinator.kill()
    cluster.until(lambda: one.job.session.connection.incarnation)
    go.set()
    one.finish(NUM_STEPS)
    causes = [restart.cause for restart in one.info().restarts]
    assert causes == [f"the coordinator of {one.job.name} died, and another has taken over the job"]


def test_nodes_that_died_meanwhile_count_as_one_restart(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = script()
    one.begin(NUM_STEPS)
    one.start()
    go = hold(cluster, 15)
    one.run(10)
    start, ended, began = cluster.processes.start, threading.Event(), threading.Event()

    async def start_later(*arguments: Any) -> Any:
        ended.set()
        await asyncio.to_thread(began.wait, 30)
        return await start(*arguments)

    monkeypatch.setattr(cluster.processes, "start", start_later)
    one.coordinator().kill()
    assert ended.wait(10)  # else it may ask for others in their places
    go.set()
    for _ in range(3):  # MemoryX, SwarmX, which has no job, and the wafer
        cluster.kill(0)
    cluster.until(lambda: len(cluster.service.nodes()) == 1)
    cluster.add(memoryx=1, swarmx=1, wafer=1)
    began.set()
    one.finish(NUM_STEPS)
    (restart,) = one.info().restarts
    assert restart.cause.count("the management service has lost it") == 2


def test_while_another_has_the_job_it_is_not_taken_up(cluster: ClusterInProcess, script: Callable[..., Script]) -> None:
    one = script()
    name = one.job.name
    assert record.is_held(cluster.settings.cache_root, name)
    another = record.JobRecord(record.RecordFolder(record.record_folder(cluster.settings.cache_root, name)))
    with pytest.raises(record.RecordTaken):
        another.hold()
    (hello,) = record.orphaned_records(cluster.settings.cache_root, cluster.address).values()
    assert (hello.job, hello.token, len(hello.nodes)) == (name, "", 3)
    assert not record.orphaned_records(cluster.settings.cache_root, "127.0.0.1:1")


def test_from_the_last_point_that_was_complete(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.RECOVERY_SECONDS.name, "0")
    monkeypatch.setattr(deadlines, "RECOVERY", replace(deadlines.RECOVERY, point_lead=0.0))
    monkeypatch.setattr(serving, "TICK_SECONDS", 0.05)
    monkeypatch.setenv(settings.HANG_SECONDS.name, "1200")  # a third of them in ticks
    monkeypatch.setattr(outbox, "BATCH_SECONDS", 0.05)
    one = script()
    for name in ("wafer-0", "worker-0"):
        cluster.behaviour.may_begin[name] = lambda step: (
            step <= 4 or (cluster.behaviour.sent and cluster.behaviour.sent[-1] + 4 >= step)
        )
    one.begin(100_000)
    one.start()
    while not any(number > 1 + (1 << 32) for number in cluster.behaviour.dropped.get("memoryx-0", [])):
        one.run(len(one.losses) + 1)
    number = cluster.behaviour.dropped["memoryx-0"][-1]
    one.kill_coordinator()
    one.run(len(one.losses) + 100)
    assert one.losses == [(step, float(step)) for step in range(1, len(one.losses) + 1)]
    assert cluster.behaviour.starts["memoryx-0"][-1].done_steps > 0
    assert cluster.behaviour.loads["memoryx-0"][-1].recovery_point >= number


def test_before_the_states_are_where_no_death_takes_them(
    cluster: ClusterInProcess, script: Callable[..., Script]
) -> None:
    one = script()
    cluster.behaviour.keeps_points = False
    one.begin(NUM_STEPS)
    wanted = one.send_states()
    cluster.until(lambda: "memoryx-0" in cluster.behaviour.starts)
    cluster.behaviour.keeps_points = True
    one.kill_coordinator()
    again = one.stream.receive("state_wanted").state_wanted
    assert again.attempt > wanted.attempt
    assert again.shards != wanted.shards
    one.answer(wanted, wrote=True)  # what belongs to the first attempt starts nothing
    one.answer(again, wrote=True)
    one.stream.receive("started")
    one.finish(NUM_STEPS)


def test_at_an_ingress(cluster: ClusterInProcess, script: Callable[..., Script], tmp_path: Path) -> None:
    ingress = Ingress(IngressSettings(management=cluster.address, cache_root=tmp_path / "cache"))
    ingress.start()
    try:
        cluster.wait_for_nodes(5)
        one = script(ingress=ingress.address)
        assert one.job.gateway
        one.begin(NUM_STEPS)
        one.start()
        go = hold(cluster, 15)
        one.run(10)
        ingress._coordinators._children[one.job.name].kill()
        cluster.until(lambda: one.job.session.connection.incarnation)
        go.set()
        one.finish(NUM_STEPS)
        one.close()
        cluster.until(lambda: not ingress._coordinators.count())
    finally:
        ingress.close()


def kill_ingress(cluster: ClusterInProcess, ingress: Ingress) -> None:
    """With the coordinators that it runs, of whose end it tells nobody."""

    async def die() -> None:
        ingress._coordinators._closing = True
        for child in ingress._coordinators._children.values():
            child.kill()
        for run in ingress._coordinators._runs.values():
            run.cancel()

    ingress._server.loop.run(die())
    ingress._server.loop.run(ingress._server.server.stop(0))
    ingress.close()


def start_ingress(cluster: ClusterInProcess, listen: str = "127.0.0.1:0") -> Ingress:
    settings = IngressSettings(management=cluster.address, cache_root=cluster.settings.cache_root, listen=listen)
    ingress = Ingress(settings)
    ingress.start()
    return ingress


@pytest.mark.parametrize("management", ["", "is started anew before", "dies before and comes after"])
def test_with_its_ingress(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch, management: str
) -> None:
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, retry=0.05))
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, retry=0.05))
    monkeypatch.setattr(supervision, "INGRESS_RETRY_SECONDS", 0.05)
    ingress = start_ingress(cluster)
    try:
        cluster.wait_for_nodes(5)
        one = script(ingress=ingress.address)
        one.begin(NUM_STEPS)
        one.start()
        go = hold(cluster, 15)
        one.run(10)
        address = cluster.address
        if management:
            cluster.stop_management()
        if management == "is started anew before":
            cluster.start_management(address)
            cluster.until(lambda: cluster.jobs())
            cluster.wait_for_nodes(5)
        kill_ingress(cluster, ingress)
        if management == "dies before and comes after":
            cluster.start_management(address)
        ingress = start_ingress(cluster, ingress.address)
        cluster.until(lambda: one.job.session.connection.incarnation, 30.0)
        go.set()
        one.finish(NUM_STEPS)
        assert one.info().num_restarts == 1
        assert ingress._coordinators.count() == 1
        one.close()
        cluster.until(lambda: not ingress._coordinators.count())
    finally:
        ingress.close()


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_script_on_another_host_that_was_cut_off_comes_back(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch, is_noticed: bool
) -> None:
    """Whether its coordinator notices it, or hears of it by the script that comes again."""
    monkeypatch.setattr(session_job, "host_id", lambda: "elsewhere")
    check = ClientSession.check_connection
    if not is_noticed:

        async def wait(session: ClientSession) -> None:
            await asyncio.sleep(20.0)

        monkeypatch.setattr(ClientSession, "check_connection", wait)
    one = script()
    one.begin(NUM_STEPS)
    one.start()
    go = hold(cluster, 15)
    one.run(10)
    one.job.run(one.job.session.connection.channel.close(None))
    cluster.until(lambda: one.job.session.connection.incarnation)
    monkeypatch.setattr(ClientSession, "check_connection", check)
    go.set()
    one.finish(NUM_STEPS)
    (restart,) = one.info().restarts
    broke = f"the connection between the script and the coordinator of {one.job.name} broke"
    assert restart.cause == f"{broke}, and another has taken over the job"
    one.begin(5)
    one.start()
    one.finish(5)
    one.close()
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_SUCCEEDED)


def test_a_script_whose_host_is_silent_for_too_long_is_given_up_until_it_comes_back(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_job, "host_id", lambda: "elsewhere")
    monkeypatch.setattr(deadlines, "KEEPALIVE", replace(deadlines.KEEPALIVE, vanished=0.3))
    silent = threading.Event()
    monkeypatch.setattr(vanished_hosts, "is_silent", lambda connection, seconds: silent.is_set())
    one = script()
    one.begin(NUM_STEPS)
    one.start()
    go = hold(cluster, 15)
    one.run(10)
    silent.set()
    cluster.until(lambda: one.job.session.connection.incarnation)
    silent.clear()
    go.set()
    one.finish(NUM_STEPS)
    (restart,) = one.info().restarts
    assert restart.cause.startswith(f"the connection between the script and the coordinator of {one.job.name} broke")
    one.close()


def test_a_script_on_another_host_that_does_not_come_back_ends_its_job(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_job, "host_id", lambda: "elsewhere")
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, session_return=0.5))
    one = script()
    one.job.session._may_be_replaced = False
    one.job.run(one.job.session.connection.channel.close(None))
    cluster.until(lambda: cluster.jobs()[0].ended)
    assert cluster.jobs()[0].phase == management_pb2.JOB_PHASE_CANCELLED
    assert "the client did not come back within 0.5 s" in cluster.jobs()[0].message
    cluster.until(lambda: cluster.free_nodes() == 4)


def test_a_script_that_ends_while_its_coordinator_waits_for_it_ends_its_job_at_once(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections of a process that is killed are closed a moment before it is gone."""
    one = script()
    one.begin(NUM_STEPS)
    one.start()
    one.job.session._may_be_replaced = False
    runs = iter([True])  # as the first coordinator looks
    monkeypatch.setattr(ProcessHost, "is_running", lambda self, process_id, process_started: next(runs, False))
    one.job.run(one.job.session.connection.channel.close(None))
    cluster.until(lambda: cluster.jobs()[0].ended)
    assert cluster.jobs()[0].phase == management_pb2.JOB_PHASE_CANCELLED
    assert f"the script (pid {os.getpid()}) has ended" in cluster.jobs()[0].message
    cluster.until(lambda: cluster.free_nodes() == 4)


def test_a_script_on_another_host_may_leave_an_execution(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_job, "host_id", lambda: "elsewhere")
    one = script()
    one.begin(100_000)
    one.start()
    one.run(3)
    one.stream.close()
    one.begin(5)
    one.start()
    one.finish(5)
    assert not one.job.session.connection.incarnation


def test_with_an_ingress_that_does_not_come_back(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, ingress_return=0.3))
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, another=0.5))
    ingress = start_ingress(cluster)
    cluster.wait_for_nodes(5)
    one = script(ingress=ingress.address)
    kill_ingress(cluster, ingress)
    cluster.until(lambda: one.info().ended)
    assert f"the ingress at {ingress.address} does not run it" in one.info().message
    cluster.until(lambda: cluster.free_nodes() == 4)
    cluster.until(lambda: one.job.failure is not None)
    assert isinstance(one.job.failure, NodeLostError)
    assert f"the connection to the ingress at {ingress.address} broke" in str(one.job.failure)


def test_while_a_checkpoint_is_read(cluster: ClusterInProcess, script: Callable[..., Script]) -> None:
    one = script()
    one.begin(20, checkpoint_steps=(10, 20))
    one.start()
    one.run(10)
    assert one.stream.receive("checkpoint").checkpoint.step == 10
    before = one.job.shards(10)
    one.kill_coordinator()
    assert one.job.shards(10) != before  # it waits until the snapshot is there again
    assert len(cluster.behaviour.starts["memoryx-0"]) == 2
    one.take(10)
    one.run(20)
    assert one.stream.receive("checkpoint").checkpoint.step == 20
    one.take(20)
    one.finish(20)


def test_between_executions_the_states_are_put_back(cluster: ClusterInProcess, script: Callable[..., Script]) -> None:
    one = script()
    one.begin(5)
    one.start()
    one.finish(5)
    last_point = cluster.behaviour.starts["memoryx-0"][-1].last_recovery_point
    one.kill_coordinator()
    one.job.shards()
    restored = cluster.behaviour.loads["memoryx-0"][-1]
    assert restored.recovery_point == last_point
    assert not restored.links
    one.begin(5)
    one.answer(one.stream.receive("state_wanted").state_wanted, wrote=False)
    one.stream.receive("started")
    one.finish(5)
    assert cluster.behaviour.prepared["worker-0"].builder == b"anything"


def test_between_a_compile_and_the_first_execution(cluster: ClusterInProcess, script: Callable[..., Script]) -> None:
    one = script()
    cluster.behaviour.prepared.clear()
    one.kill_coordinator()
    one.begin(5)
    one.start()
    one.finish(5)
    assert cluster.behaviour.prepared["worker-0"].builder == b"anything"


def test_while_another_node_is_replaced(cluster: ClusterInProcess, script: Callable[..., Script]) -> None:
    one = script()
    one.begin(NUM_STEPS)
    one.start()
    go = hold(cluster, 15)
    cluster.behaviour.on_stop["memoryx-0"] = go.set  # who is held could not stop
    one.run(10)
    cluster.kill(2)
    cluster.until(lambda: one.info().waiting_for)
    incarnation = one.job.session.connection.incarnation
    one.coordinator().kill()
    cluster.add(wafer=1)
    go.set()
    cluster.until(lambda: one.job.session.connection.incarnation > incarnation)
    one.finish(NUM_STEPS)


def test_after_it_has_lost_a_wafer(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.REPLACEMENT_SECONDS.name, "1")
    monkeypatch.setenv("WAFERBOX_MIN_NUM_CSX", "1")
    cluster.add(wafer=1, workers=1)
    one = script(num_csx=2)
    one.begin(NUM_STEPS)
    one.start()
    go = hold(cluster, 15)
    cluster.behaviour.on_stop["memoryx-0"] = go.set  # who is held could not stop
    one.run(10)
    cluster.kill(2)
    cluster.until(lambda: one.info().num_restarts)
    assert "the job has 1 of 2 wafers from now on" in one.info().restarts[0].cause
    one.kill_coordinator()
    go.set()
    one.finish(NUM_STEPS)
    assert cluster.behaviour.prepared["worker-0"].redivided
    assert sorted(node.member for node in one.info().nodes) == ["memoryx-0", "wafer-0", "worker-0"]


def test_with_a_node_at_once(cluster: ClusterInProcess, script: Callable[..., Script]) -> None:
    one = script()
    one.begin(NUM_STEPS)
    one.start()
    go = hold(cluster, 15)
    one.run(10)
    one.coordinator().kill()
    cluster.kill(0)
    cluster.add(memoryx=1)
    go.set()
    one.finish(NUM_STEPS)


def test_calls_that_are_under_way_are_made_again(cluster: ClusterInProcess, script: Callable[..., Script]) -> None:
    one = script()
    incarnation = one.job.session.connection.incarnation
    one.coordinator().kill()
    assert one.job.compile("good", OPTIONS).artifact == "artifact-good"
    one.job.prepare_input(INPUT)
    assert len(one.job.shards()) == 1
    cluster.until(lambda: one.job.session.connection.incarnation > incarnation)


def test_again_and_again_ends_the_job(cluster: ClusterInProcess, script: Callable[..., Script]) -> None:
    one = script()
    for _ in range(3):
        one.kill_coordinator()
    one.coordinator().kill()
    cluster.until(lambda: one.job.failure is not None)
    assert isinstance(one.job.failure, NodeLostError)
    assert "the last of 4" in str(one.job.failure)


def test_a_job_that_is_not_to_restart_ends(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_job, "max_num_restarts", lambda: 0)
    one = script()
    one.coordinator().kill()
    cluster.until(lambda: one.job.failure is not None)
    assert "its coordinator ended with status -9" in str(one.job.failure)


def test_a_script_that_ends_meanwhile_ends_the_job(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = script()
    one.begin(NUM_STEPS)
    one.start()
    one.run(5)
    held = threading.Event()
    start = cluster.processes.start

    async def start_later(*arguments: Any) -> Any:
        await asyncio.to_thread(held.wait, 30)
        return await start(*arguments)

    monkeypatch.setattr(cluster.processes, "start", start_later)
    one.coordinator().kill()
    threading.Timer(0.3, one.job.cancel).start()
    with pytest.raises(ClusterError):
        one.run(NUM_STEPS)
    one.stream.close()
    held.set()
    cluster.until(lambda: cluster.free_nodes() == 4)


def test_the_record_is_removed_with_the_job(cluster: ClusterInProcess, script: Callable[..., Script]) -> None:
    one = script()
    folder = record.record_folder(cluster.settings.cache_root, one.job.name)
    assert folder.stat().st_mode & 0o777 == 0o700
    one.kill_coordinator()
    one.close()
    cluster.until(lambda: not folder.exists())


def test_a_record_that_is_gone_ends_the_job_with_the_reason(
    cluster: ClusterInProcess, script: Callable[..., Script]
) -> None:
    one = script()
    (record.record_folder(cluster.settings.cache_root, one.job.name) / record.RECORD).unlink()
    one.coordinator().kill()
    cluster.until(lambda: one.job.failure is not None)
    assert "has lost its coordinator for good" in str(one.job.failure)


def test_records_without_an_owner_are_swept(tmp_path: Path) -> None:
    kept = record.JobRecord(record.RecordFolder(record.record_folder(tmp_path, "job-1")))
    kept.begin(is_kept=True)
    kept.close()
    record.sweep_records(tmp_path)
    assert (tmp_path / record.RECORDS / "job-1").exists()
    record.sweep_records(tmp_path, older_than_seconds=-1.0)
    assert not (tmp_path / record.RECORDS / "job-1").exists()


def test_a_script_that_dies_while_it_has_no_coordinator_ends_its_job_at_once(
    cluster: Any, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor would wait for a script that it has never had a session with."""
    saw_script = threading.Event()
    runs = True

    def saw(record: JobRecord) -> None:
        record_script(record)
        saw_script.set()

    record_script = JobRecord.saw_script
    monkeypatch.setattr(JobRecord, "saw_script", saw)
    monkeypatch.setattr(ProcessHost, "is_running", lambda self, process_id, process_started: runs)
    one = script()
    one.begin(NUM_STEPS)
    one.start()
    assert saw_script.wait(20.0)
    runs = False
    one.job.session._may_be_replaced = False
    one.coordinator().kill()
    cluster.until(lambda: cluster.jobs()[0].ended, 15.0)
    assert f"the script (pid {os.getpid()}) has ended" in cluster.jobs()[0].message
    cluster.until(lambda: cluster.free_nodes() == 4)


@pytest.mark.parametrize("is_held", [True, False])
def test_what_is_left_of_an_ended_job_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    """Where its last coordinator died; another process that has the job removes it itself."""
    monkeypatch.setenv(settings.RECOVERY_DIR.name, str(tmp_path / "points"))
    names = ["job-00000000", "job-0123abcd"]
    for name in names:
        (tmp_path / "points" / name / "memoryx-0").mkdir(parents=True)
        kept = record.JobRecord(record.RecordFolder(record.record_folder(tmp_path, name)))
        kept.begin(is_kept=True)
        if not is_held:
            kept.close()
    for name in (names[1], "", ".", "..", "points", f"../{record.RECORDS}"):
        record.remove_left(tmp_path, name)
    kept.close()
    left = names if is_held else names[:1]
    assert sorted(path.name for path in (tmp_path / "points").iterdir()) == sorted(left)
    assert sorted(path.name for path in (tmp_path / record.RECORDS).iterdir()) == sorted(left)


def test_a_service_that_ends_leaves_nothing_of_a_job_without_a_coordinator(
    cluster: ClusterInProcess, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = script()
    one.job.session._may_be_replaced = False
    folder = record.record_folder(cluster.settings.cache_root, one.job.name)
    ended = threading.Event()

    async def start_nothing(*arguments: Any) -> Any:
        ended.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(cluster.processes, "start", start_nothing)
    one.coordinator().kill()
    assert ended.wait(10)
    assert folder.exists()
    monkeypatch.setattr(deadlines, "END", replace(deadlines.END, coordinator=0.2))
    cluster.server.loop.run(cluster.service.close(end_jobs=True))
    assert not folder.exists()
