"""A job goes on when nodes die: in new epochs, from recovery points, with what the client gets as if nobody had."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import grpc
import numpy
import pytest
from cluster_in_process import Client, ClusterInProcess

from appliance.coordinator import serving
from appliance.coordinator.compilation import CompileRefused
from appliance.coordinator.nodes.topology import Member
from appliance.coordinator.recovery import recovery
from appliance.coordinator.recovery.fewer_wafers import FewerWafers
from waferbox import deadlines, settings
from waferbox.runtime import outbox
from waferbox.runtime.node_job import JobContext, JobFailure
from waferbox.runtime.role_job import report_failure
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, observation_pb2

FULL = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}
ROLES = list(FULL)  # in this order they are started
NUM_STEPS = 40
SECONDS = 5.0  # that are promised for each


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.REPLACEMENT_SECONDS.name, "20")


class Gate:
    """Holds a node before a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, context: object, step: int) -> None:
        if step == self.step:
            self.reached.set()
            self.opened.wait(30)


def losses(outputs: list[coordinator_pb2.StepOutputs]) -> list[tuple[int, float]]:
    return [(each.step, float(numpy.frombuffer(each.tensors[0], numpy.float32)[0])) for each in outputs]


def all_outputs(one: Client, num_steps: int, begun: int = 0) -> list[coordinator_pb2.StepOutputs]:
    got = []
    for step in range(begun + 1, num_steps + 1):
        got.append(one.receive_outputs())
        one.consumed(step)
    return got


def replace(cluster: ClusterInProcess, role: str) -> None:
    """The node of a role dies, and another comes."""
    cluster.kill(next(index for index, (module, _) in enumerate(cluster.nodes) if module == role))
    cluster.add(**{role: 1})


@pytest.mark.parametrize(
    ("wafers", "role"), [(1, "memoryx"), (1, "wafer"), (1, "workers"), *((2, role) for role in ROLES)]
)
def test_outputs_are_those_of_a_run_in_which_nobody_dies(
    cluster: ClusterInProcess, client: Callable[..., Client], wafers: int, role: str
) -> None:
    cluster.add(**{**FULL, "wafer": wafers, "workers": wafers})
    one = client(num_csx=wafers, max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    gate = Gate(15)
    cluster.behaviour.on_step["swarmx-0" if wafers > 1 else "wafer-0"] = gate
    one.begin(NUM_STEPS)
    one.start()
    got = all_outputs(one, 10)
    assert gate.reached.wait(20)
    for name in ("memoryx-0", "wafer-0"):  # whoever lives is told to stop
        cluster.behaviour.on_stop[name] = gate.opened.set
    replacing = threading.Thread(target=replace, args=(cluster, role))
    replacing.start()
    got += all_outputs(one, NUM_STEPS, 10)
    assert losses(got) == [(step, float(step)) for step in range(1, NUM_STEPS + 1)]
    one.receive("finished")
    replacing.join(20)
    assert len(cluster.behaviour.starts["wafer-0"]) == 2


def test_traces_and_reports_follow_a_recovery(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "BATCH_SECONDS", 0.05)
    cluster.add(**FULL)
    one = client(max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    sent = cluster.behaviour.sent
    for name in ("memoryx-0", "worker-0"):
        cluster.behaviour.may_begin[name] = lambda step: step <= 4 or bool(sent and sent[-1] + 4 >= step)
    one.begin(100_000)
    one.start()
    all_outputs(one, 10)
    replace(cluster, "wafer")
    request = observation_pb2.TraceJobRequest(job=one.created.job, num_steps=3)
    traced: list[observation_pb2.Span] = []

    def trace() -> None:
        for response in cluster.observation.TraceJob(request, timeout=20):
            traced.extend(response.spans)

    tracing = threading.Thread(target=trace)
    steps = itertools.count(11)
    while len(cluster.behaviour.starts["wafer-0"]) < 2:
        one.receive_outputs()
        one.consumed(next(steps))
    tracing.start()
    while tracing.is_alive():
        time.sleep(0.002)
        one.receive_outputs()
        one.consumed(next(steps))
    assert {span.node for span in traced} == {"memoryx-0", "wafer-0", "worker-0"}
    watched = observation_pb2.WatchJobRequest(job=one.created.job, kinds=["scalar", "report"])

    def seen() -> list[observation_pb2.JobEvent]:
        return [event for lot in cluster.observation.WatchJob(watched, timeout=20) for event in lot.events]

    cluster.until(lambda: any((event.report.execution, event.report.epoch) == (1, 2) for event in seen()))
    assert {event.scalar.execution for event in seen() if event.HasField("scalar")} == {1}


class Death(threading.Event):
    """The first node's connections end at the first call; the node itself is to be closed by the test."""

    def __init__(self, cluster: ClusterInProcess) -> None:
        super().__init__()
        self._cluster = cluster

    def __call__(self) -> None:
        if not self.is_set():
            self._cluster.nodes[0][1]._server.stop(0)
            self.set()


@pytest.mark.timeout(60)
def test_nobody_waits_for_a_node_that_dies_while_it_is_being_stopped(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "ATTACHMENT", dataclasses.replace(deadlines.ATTACHMENT, stop=600.0))
    cluster.add(**FULL)
    died = cluster.behaviour.on_stop["memoryx-0"] = Death(cluster)
    one = client(max_num_restarts=3)
    one.compile()
    one.begin(NUM_STEPS)
    one.start()
    assert losses(all_outputs(one, NUM_STEPS)) == [(step, float(step)) for step in range(1, NUM_STEPS + 1)]
    one.receive("finished")
    assert died.is_set()
    replace(cluster, "memoryx")


def test_a_node_that_dies_while_it_is_attached_to_is_replaced(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)
    died = cluster.behaviour.on_attach["memoryx-0"] = Death(cluster)
    one = client(max_num_restarts=3)
    assert died.wait(20)
    replace(cluster, "memoryx")
    one.compile()
    one.begin(NUM_STEPS)
    one.start()
    assert losses(all_outputs(one, NUM_STEPS)) == [(step, float(step)) for step in range(1, NUM_STEPS + 1)]


def test_a_job_goes_on_from_the_last_point_that_is_complete(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.RECOVERY_SECONDS.name, "0")
    monkeypatch.setattr(deadlines, "RECOVERY", dataclasses.replace(deadlines.RECOVERY, point_lead=0.0))
    monkeypatch.setattr(serving, "TICK_SECONDS", 0.05)
    monkeypatch.setenv(settings.HANG_SECONDS.name, "1200")  # a third of them in ticks
    monkeypatch.setattr(outbox, "BATCH_SECONDS", 0.05)
    cluster.add(**FULL)
    one = client(max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    for name in ("wafer-0", "worker-0"):
        cluster.behaviour.may_begin[name] = lambda step: (
            step <= 4 or (cluster.behaviour.sent and cluster.behaviour.sent[-1] + 4 >= step)
        )
    one.begin(100_000)
    one.start()
    begun = 0
    while not any(number > 1 + (1 << 32) for number in cluster.behaviour.dropped.get("memoryx-0", [])):
        all_outputs(one, begun + 1, begun)
        begun += 1
    number = cluster.behaviour.dropped["memoryx-0"][-1]
    replace(cluster, "wafer")
    all_outputs(one, begun + 100, begun)
    start = cluster.behaviour.starts["memoryx-0"][-1]
    assert start.done_steps > 0
    assert cluster.behaviour.loads["memoryx-0"][-1].recovery_point >= number
    assert cluster.behaviour.loads["worker-0"][-1].done_steps == start.done_steps


def test_states_are_wanted_again_until_they_cannot_be_lost(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)
    cluster.behaviour.keeps_points = False
    one = client(max_num_restarts=3)
    one.compile()
    one.begin(NUM_STEPS)
    wanted = one.receive("state_wanted").state_wanted
    one.send(state_sent=coordinator_pb2.StateSent(attempt=wanted.attempt, wrote=True))
    cluster.until(lambda: "memoryx-0" in cluster.behaviour.starts)
    cluster.behaviour.keeps_points = True
    replace(cluster, "memoryx")
    again = one.receive("state_wanted").state_wanted
    assert again.attempt == wanted.attempt + 1
    assert [shard.address for shard in again.shards] != [shard.address for shard in wanted.shards]
    one.send(state_sent=coordinator_pb2.StateSent(attempt=again.attempt, wrote=True))
    one.receive("started")
    assert losses(all_outputs(one, NUM_STEPS)) == [(step, float(step)) for step in range(1, NUM_STEPS + 1)]


def test_a_checkpoint_that_is_being_read_can_be_read_again(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)
    one = client(max_num_restarts=3)
    one.compile()
    one.begin(20, checkpoint_steps=(10, 20))
    one.start()
    all_outputs(one, 10)
    assert one.receive("checkpoint").checkpoint.step == 10
    shards = [shard.address for shard in one.stub.Shards(request_for(one, 10), timeout=20).shards]
    replace(cluster, "memoryx")
    cluster.until(lambda: [s.address for s in one.stub.Shards(request_for(one, 10), timeout=20).shards] != shards)
    one.send(checkpoint_released=coordinator_pb2.CheckpointReleased(step=10))
    outputs = all_outputs(one, 20, 10)
    assert losses(outputs) == [(step, float(step)) for step in range(11, 21)]
    assert one.receive("checkpoint").checkpoint.step == 20
    one.send(checkpoint_released=coordinator_pb2.CheckpointReleased(step=20))
    one.receive("finished")


def request_for(one: Client, step: int) -> coordinator_pb2.ShardsRequest:
    return coordinator_pb2.ShardsRequest(token=one.created.token, step=step)


def test_between_executions_the_states_are_put_back(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**FULL)
    one = client(max_num_restarts=3)
    one.compile()
    one.begin(5)
    one.start()
    all_outputs(one, 5)
    one.receive("finished")
    before = len(cluster.behaviour.loads["memoryx-0"])
    last_point = cluster.behaviour.starts["memoryx-0"][-1].last_recovery_point
    replace(cluster, "memoryx")
    cluster.until(lambda: len(cluster.behaviour.loads["memoryx-0"]) > before)
    restored = cluster.behaviour.loads["memoryx-0"][-1]
    assert restored.recovery_point == last_point
    assert not restored.links
    with pytest.raises(grpc.RpcError, match="runs no steps now"):
        list(
            cluster.observation.TraceJob(observation_pb2.TraceJobRequest(job=one.created.job, num_steps=1), timeout=20)
        )
    (shard,) = one.stub.Shards(request_for(one, 0), timeout=20).shards
    assert shard.address == cluster.nodes[-1][1].address
    one.begin(5)
    wanted = one.receive("state_wanted").state_wanted
    one.send(state_sent=coordinator_pb2.StateSent(attempt=wanted.attempt))
    one.receive("started")
    cluster.until(lambda: len(cluster.behaviour.starts["memoryx-0"]) == 2)
    assert not cluster.behaviour.starts["memoryx-0"][-1].recovery_point  # nobody has written anything
    assert losses(all_outputs(one, 5)) == [(step, float(step)) for step in range(1, 6)]


def test_a_recovery_point_that_does_not_heal_ends_the_job_at_once(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    """With the death after which it was needed, and not at the limit of restarts."""
    cluster.add(**FULL)
    one = client(max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    one.begin(100_000)
    one.start()
    loads = []

    def refuse(context: JobContext) -> None:
        loads.append(context.node)
        raise JobFailure(node_pb2.Failure.KIND_USER, "recovery point 1 cannot be read: 1 is damaged")

    cluster.behaviour.on_load["memoryx-0"] = refuse
    replace(cluster, "wafer")
    failure = one.failure()
    assert failure.kind == node_pb2.Failure.KIND_NODE
    assert failure.message.startswith("wafer-0 (pid")
    assert failure.message.endswith("; recovery point 1 cannot be read: 1 is damaged")
    assert loads == ["memoryx-0"]


def test_deaths_without_progress_end_the_job_with_all_of_them(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)
    one = client(max_num_restarts=2, run_ahead_steps=4)
    one.compile()
    one.begin(100_000)
    one.start()

    def has_started(times: int) -> bool:
        return len(cluster.behaviour.starts.get("wafer-0", [])) == times

    for count in range(1, 4):
        cluster.until(partial(has_started, count))
        replace(cluster, "wafer")
    failure = one.failure()
    assert failure.kind == node_pb2.Failure.KIND_NODE
    assert failure.message.count("wafer-0 (pid") == 3
    assert "max_num_restarts is 2" in failure.message


def test_a_death_that_is_told_of_twice_counts_once(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection and management tell of it; the second when another is being looked for already."""
    replace_dead = recovery.Recovery._replace_dead
    told: list[Member] = []

    async def tell_again(self: recovery.Recovery) -> None:
        if not told:
            dead = [member for member, _ in self._dead.values()]
            told.extend(dead)
            for member in dead:
                self.died(member, "as another says, it is gone")
        await replace_dead(self)

    monkeypatch.setattr(recovery.Recovery, "_replace_dead", tell_again)
    cluster.add(**FULL)
    one = client(max_num_restarts=1, run_ahead_steps=4)
    one.compile()
    one.begin(NUM_STEPS)
    one.start()
    cluster.until(lambda: "wafer-0" in cluster.behaviour.starts)
    replace(cluster, "wafer")
    assert losses(all_outputs(one, NUM_STEPS)) == [(step, float(step)) for step in range(1, NUM_STEPS + 1)]
    one.receive("finished")
    assert [member.name for member in told] == ["wafer-0"]
    assert cluster.jobs()[0].num_restarts == 1


def test_a_job_without_a_spare_says_what_it_waits_for_and_goes_on_with_the_next_node(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)
    one = client(max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    one.begin(NUM_STEPS)
    one.start()
    got = all_outputs(one, 10)
    begin = time.monotonic()
    cluster.kill(ROLES.index("wafer"))
    waits = next(told.queue.waiting_for for told in one.session if told.queue.waiting_for)
    assert time.monotonic() - begin < SECONDS
    assert waits.startswith("1 wafer, not in the cluster; ")
    cluster.add(wafer=1)
    registered = time.monotonic()
    cluster.until(lambda: len(cluster.behaviour.starts["memoryx-0"]) == 2)
    assert time.monotonic() - registered < SECONDS
    got += all_outputs(one, NUM_STEPS, 10)
    assert losses(got) == [(step, float(step)) for step in range(1, NUM_STEPS + 1)]


def test_a_client_may_leave_an_execution_whose_nodes_are_being_replaced(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "RECOVERY", dataclasses.replace(deadlines.RECOVERY, launcher=0.1))
    monkeypatch.setattr(serving, "TICK_SECONDS", 0.05)
    monkeypatch.setenv(settings.HANG_SECONDS.name, "1200")  # a third of them in ticks
    cluster.add(**FULL)
    one = client(max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    one.begin(100_000)
    one.start()
    all_outputs(one, 10)
    cluster.kill(ROLES.index("wafer"))
    next(told for told in one.session if told.queue.waiting_for)
    one.call.cancel()
    cluster.add(wafer=1)
    assert one.stub.Shards(request_for(one, 0), timeout=20).shards
    one.begin(5)
    one.start()
    assert losses(all_outputs(one, 5)) == [(step, float(step)) for step in range(1, 6)]


def test_a_job_that_cannot_be_reduced_for_want_of_an_answer_ends_with_the_cause(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def give_up(fewer_wafers: FewerWafers, dead: Collection[str]) -> str:
        raise TimeoutError("management does not answer within 10 s")

    monkeypatch.setattr(FewerWafers, "shrink_to_survivors", give_up)
    monkeypatch.setenv(settings.REPLACEMENT_SECONDS.name, "0.2")
    cluster.add(**FULL)
    one = client(max_num_restarts=3)
    one.compile()
    one.begin(100_000)
    one.start()
    cluster.kill(2)
    failure = one.failure()
    assert failure.kind == node_pb2.Failure.KIND_NODE
    assert failure.message.startswith("wafer-0 (pid ")
    assert "the job cannot have fewer wafers either: management does not answer within 10 s" in failure.message


def test_a_job_that_finds_no_replacement_ends_with_the_cause(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.REPLACEMENT_SECONDS.name, "0.2")
    cluster.add(**FULL)
    one = client(max_num_restarts=3)
    one.compile()
    one.begin(100_000)
    one.start()
    cluster.kill(2)
    failure = one.failure()
    assert failure.node == "wafer-0"
    assert "there was no replacement within 0.2 s: management had no free node" in failure.message
    assert "Start nodes (`python -m wafer --management ADDRESS`), then the script" in failure.message
    assert "the script again from its last checkpoint" in failure.message
    assert failure.message.count("0.2 s") == 1
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED)


def test_a_lost_link_needs_no_replacement(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**FULL)
    one = client(max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    failed = threading.Event()

    def lose(context: Any, step: int) -> None:
        if step == 30 and not failed.is_set():
            failed.set()
            report_failure(
                context, JobFailure(node_pb2.Failure.KIND_NODE, "the link to wafer-0 is lost: reset", peer="wafer-0")
            )

    cluster.behaviour.on_step["memoryx-0"] = lose
    one.begin(NUM_STEPS)
    one.start()
    assert losses(all_outputs(one, NUM_STEPS)) == [(step, float(step)) for step in range(1, NUM_STEPS + 1)]
    one.receive("finished")
    assert len(cluster.behaviour.starts["wafer-0"]) == 2


TWO = {"memoryx": 2, "swarmx": 2, "wafer": 2, "workers": 4}


def kill_member(cluster: ClusterInProcess, member: str) -> None:
    addresses = {node.member: node.address for node in cluster.wait_for_nodes(len(cluster.nodes))}
    cluster.kill(next(i for i, (_, node) in enumerate(cluster.nodes) if node.address == addresses[member]))


@pytest.mark.parametrize("victims", [["wafer-0"], ["wafer-1"], ["worker-1"], ["wafer-0", "worker-3"]])
def test_fewer_wafers_do_where_none_comes(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, victims: list[str]
) -> None:
    monkeypatch.setenv(settings.REPLACEMENT_SECONDS.name, "0.3")
    cluster.add(**TWO)
    one = client(num_csx=2, num_workers_per_csx=2, max_num_restarts=3, min_num_csx=1, run_ahead_steps=4)
    one.compile()
    one.stub.PrepareInput(
        coordinator_pb2.PrepareInputRequest(token=one.created.token, input=node_pb2.PrepareInput(loader="train"))
    )
    gate = Gate(15)
    cluster.behaviour.on_step["swarmx-0"] = gate
    one.begin(NUM_STEPS)
    one.start()
    got = all_outputs(one, 10)
    assert gate.reached.wait(20)
    for victim in victims:
        kill_member(cluster, victim)
    gate.opened.set()
    got += all_outputs(one, NUM_STEPS, 10)
    assert losses(got) == [(step, float(step)) for step in range(1, NUM_STEPS + 1)]
    one.receive("finished")
    members = ["memoryx-0", "memoryx-1", "wafer-0", "worker-0", "worker-1"]
    cluster.until(
        lambda: sorted(node.member for node in cluster.wait_for_nodes(10 - len(victims)) if node.job) == members
    )
    for number, worker in enumerate(("worker-0", "worker-1")):
        prepared = cluster.behaviour.prepared[worker]
        assert (prepared.wafer, prepared.num_csx, prepared.worker, prepared.redivided) == (0, 1, number, True)
    (job,) = cluster.jobs()
    assert sorted(node.member for node in job.nodes) == members
    assert (
        f"there is no replacement of {', '.join(victims)}: the job has 1 of 2 wafers from now on, as min_num_csx allows"
        in job.restarts[-1].cause
    )
    # It is a job like any other: another step is compiled for what there is, and who dies now has no other either.
    assert one.compile("second").artifact == "artifact-second-placed"
    one.begin(3, artifact="artifact-second-placed")
    one.start()
    all_outputs(one, 3)
    one.receive("finished")
    if victims == ["worker-1"]:
        monkeypatch.setenv(settings.REPLACEMENT_SECONDS.name, "20")
    kill_member(cluster, "wafer-0")
    if victims == ["worker-1"]:
        one.begin(3)  # the wafer that was let go takes the place
        one.start()
        all_outputs(one, 3)
    else:
        assert "there was no replacement within 0.3 s" in one.failure().message


def test_as_many_wafers_are_left_as_divide_the_batch(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.REPLACEMENT_SECONDS.name, "0.3")
    tried = []

    def compile_step(cirh: str, num_csx: int, num_shards: int, placed: Any) -> Any:
        tried.append(num_csx)
        if num_csx == 3:
            raise CompileRefused("4 rows cannot be divided among 3 wafers")
        return fake(cirh, num_csx, num_shards, placed)

    rig = type(cluster).__init__.__globals__
    fake = rig["fake_compile"]
    monkeypatch.setitem(rig, "fake_compile", compile_step)
    cluster.add(memoryx=1, swarmx=1, wafer=4, workers=4)
    one = client(num_csx=4, max_num_restarts=3, min_num_csx=2)
    one.compile()
    one.begin(NUM_STEPS)
    one.start()
    kill_member(cluster, "wafer-1")
    all_outputs(one, NUM_STEPS)
    one.receive("finished")
    assert tried == [4, 3, 2]
    (job,) = cluster.jobs()
    assert [node.member for node in job.nodes if node.role == node_pb2.ROLE_WAFER] == ["wafer-0", "wafer-1"]


@pytest.mark.parametrize(("least", "victim"), [(0, "wafer-0"), (2, "wafer-0"), (1, "memoryx-0")])
def test_a_job_that_may_not_have_fewer_ends(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, least: int, victim: str
) -> None:
    monkeypatch.setenv(settings.REPLACEMENT_SECONDS.name, "0.3")
    cluster.add(memoryx=1, swarmx=1, wafer=2, workers=2)
    one = client(num_csx=2, max_num_restarts=3, min_num_csx=least)
    one.compile()
    kill_member(cluster, victim)
    assert "there was no replacement within 0.3 s" in one.failure().message
