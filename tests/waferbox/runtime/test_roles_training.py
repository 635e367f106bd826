"""MemoryX, SwarmX and wafers run a small plan together, each a node of its own, over both lanes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from memoryx_nodes import memoryx_node
from role_rig import DEADLINE, AttachedNode, FakeManagement, SmallJob, StateClient, Topology
from small_plan import INNER, OUTER, SmallPlan
from wafer_nodes import wafer_node

from memoryx import paging
from swarmx.swarmx_program import SwarmXJob
from waferbox import deadlines, roles
from waferbox.runtime.node import Node, NodeSettings
from waferbox.states.state_memory import TRANSFER_BYTES, StateSettings
from wsc.v1 import node_pb2

pytestmark = pytest.mark.services

LANES = [
    pytest.param(node_pb2.LANE_SHARED_MEMORY, id="shared-memory"),
    pytest.param(node_pb2.LANE_GRPC, id="grpc"),
]
PLACES = ["in memory", "in files"]  # of the states
MakeJob = Callable[..., SmallJob[SmallPlan]]


def by_pairs(*values: object) -> Any:
    """Runs a test with each value, each on both lanes and in both places: all pairs, in half of the combinations."""
    return [
        pytest.param(value, lane.values[0], place, id=f"{place}-{lane.id}-{value}")
        for number, value in enumerate(values)
        for at, lane in enumerate(LANES)
        for place in [PLACES[(number + at) % 2]]
    ]


@pytest.fixture(params=PLACES)
def make_job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeJob]:
    """With states in memory, and in files of which only what one instruction touches has room in memory."""
    states = StateSettings()
    if request.param == "in files":
        monkeypatch.setattr(paging, "resident_bytes", lambda: 0)
        states = StateSettings(folder=tmp_path, limit_bytes=TRANSFER_BYTES + 2 * INNER * OUTER * 4)
    with ExitStack() as stack:
        management = FakeManagement()
        stack.callback(management.close)

        def attach(node: Node, name: str, index: int, lane: "node_pb2.Lane.ValueType") -> AttachedNode:
            node.start()
            stack.callback(node.close)
            attached = AttachedNode(node.address, name, index, lane)
            stack.callback(attached.close)
            return attached

        def make(
            lane: "node_pb2.Lane.ValueType",
            wafers: int = 1,
            shards: int = 1,
            leaves: int = 0,
            workers: int = 1,
            trees: int = 0,
        ) -> SmallJob[SmallPlan]:
            settings = NodeSettings(management=management.address)
            num_swarmx = trees or (0 if wafers == 1 else 1 + leaves)
            nodes = Topology(
                [attach(memoryx_node(management.address, states), f"memoryx-{i}", i, lane) for i in range(shards)],
                [attach(Node(roles.SWARMX, settings, SwarmXJob), f"swarmx-{i}", i, lane) for i in range(num_swarmx)],
                [attach(wafer_node(settings), f"wafer-{i}", i, lane) for i in range(wafers)],
                has_trees=bool(trees),
            )
            job = SmallJob(SmallPlan(num_shards=shards, num_wafers=wafers), nodes, lane, num_workers=workers)
            stack.callback(job.close)
            return job

        yield make


def write_states(job: SmallJob[SmallPlan]) -> list[StateClient]:
    clients = []
    for shard, node in enumerate(job.nodes.memoryx):
        client = StateClient(node, job.lane)
        client.write({f"w{shard}": torch.full((INNER, OUTER), 0.01 * (shard + 1)), "count": torch.zeros(())})
        clients.append(client)
    return clients


# Wafers, shards, leaves, workers and trees.
@pytest.mark.parametrize(
    ("nodes", "lane", "make_job"),
    by_pairs(
        (1, 1, 0, 1, 0),
        (1, 3, 0, 2, 0),
        (2, 1, 0, 2, 0),
        (2, 2, 0, 1, 0),
        (3, 2, 2, 1, 0),
        (1, 3, 0, 1, 3),
        (3, 3, 0, 1, 2),
    ),
    indirect=["make_job"],
)
def test_training_equals_plain_torch(
    make_job: MakeJob, lane: "node_pb2.Lane.ValueType", nodes: tuple[int, int, int, int, int]
) -> None:
    job = make_job(lane, *nodes)
    missing = job.load(1)
    assert missing["memoryx-0"] == ["count", "w0"]
    assert not missing["wafer-0"]
    clients = write_states(job)
    job.start(1, num_steps=7, activation_steps=1, run_ahead_steps=3)
    expected = job.plan.expected(7)
    for step in range(1, 8):
        loss, count, gathered = job.outputs(step)
        assert loss == pytest.approx(expected.losses[step - 1], rel=1e-4, abs=1e-3)
        assert count == step
        torch.testing.assert_close(gathered, expected.gathered[step - 1], rtol=1e-4, atol=1e-4)
    work = {"memoryx": "update", "swarmx": "reduce", "wafer": "compute"}
    for node in job.nodes.all:
        seconds = dict(node.expect("finished").finished.seconds)
        assert seconds["total"] > 0
        assert sum(seconds.values()) == pytest.approx(2 * seconds["total"])
        assert seconds[work[node.name.partition("-")[0]]] > 0
        # The last report comes before the word of the end.
        report = next(event.report for event in reversed(node.seen) if event.HasField("report"))
        assert (report.node, report.epoch, report.step, dict(report.seconds)) == (node.name, 1, 7, seconds)
        assert report.memory_bytes > 2**20
        assert report.cpu_seconds > 0
    for shard, client in enumerate(clients):
        found = client.read({f"w{shard}": (INNER, OUTER), "count": ()})
        torch.testing.assert_close(found[f"w{shard}"], expected.weights[-1][shard], rtol=1e-5, atol=1e-5)
        assert found["count"] == 7
        client.close()
    job.stop(1)


@pytest.mark.parametrize(("brings_plan", "lane", "make_job"), by_pairs(True, False), indirect=["make_job"])
def test_second_execution_goes_on_from_the_state(
    make_job: MakeJob, lane: "node_pb2.Lane.ValueType", brings_plan: bool
) -> None:
    job = make_job(lane)
    job.load(1)
    (client,) = write_states(job)
    job.start(1, num_steps=2, activation_steps=1, run_ahead_steps=8)
    for step in (1, 2):
        job.outputs(step)
    for node in job.nodes.all:
        node.expect("finished")
    job.stop(1)
    before = client.read({"w0": (INNER, OUTER)})["w0"]
    torch.testing.assert_close(before, job.plan.expected(2).weights[-1][0], rtol=1e-5, atol=1e-5)
    assert job.load(2, brings_plan=brings_plan)["memoryx-0"] == []
    torch.testing.assert_close(client.read({"w0": (INNER, OUTER)})["w0"], before, rtol=0, atol=0)
    job.start(2, num_steps=1, activation_steps=1, run_ahead_steps=8)
    assert job.outputs(1)[1] == 3
    client.close()


Told = dict[tuple[str, int], list[torch.Tensor]]  # outputs and snapshots, by step of the execution


def run_epoch(job: SmallJob[SmallPlan], states: list[dict[str, torch.Tensor]], num_steps: int, done_steps: int) -> Told:
    """On new nodes, from these states, which become those after the last step."""
    job.load(1)
    for node, own in zip(job.nodes.memoryx, states, strict=True):
        client = StateClient(node, job.lane)
        client.write(own)
        client.close()
    schedule = job.start(
        1, num_steps, done_steps=done_steps, activation_steps=4, run_ahead_steps=1, checkpoint_steps=[2, 5, 8]
    )
    told: Told = {}
    for step in schedule.steps_for_client(has_outputs=True):
        of_execution = schedule.global_step(step)
        if schedule.outputs_leave(step):
            loss, count, gathered = job.outputs(step)
            told["outputs", of_execution] = [torch.tensor(loss), torch.tensor(count), gathered]
        if schedule.keeps_snapshot(step):
            for node, own in zip(job.nodes.memoryx, states, strict=True):
                assert node.expect("snapshot").snapshot.step == of_execution
                client = StateClient(node, job.lane)
                found = client.read({name: tuple(value.shape) for name, value in own.items()}, step=of_execution)
                told[f"snapshot {node.name}", of_execution] = list(found.values())
                client.close()
                node.send(release_snapshot=node_pb2.ReleaseSnapshot(step=of_execution))
    for node in job.nodes.all:
        node.expect("finished")
    for node, own in zip(job.nodes.memoryx, states, strict=True):
        client = StateClient(node, job.lane)
        own.update(client.read({name: tuple(value.shape) for name, value in own.items()}))
        client.close()
    if num_steps > done_steps:
        for node in job.nodes.all:
            report = next(event.report for event in reversed(node.seen) if event.HasField("report"))
            assert (report.step, report.done_steps) == (num_steps, done_steps)
    return told


@pytest.fixture(scope="module")
def uninterrupted() -> list[tuple[Told, list[dict[str, torch.Tensor]]]]:
    """What an execution of all steps told and its states, once there was one: on each lane the same to the bit."""
    return []


# Steps that are done before, and workers.
@pytest.mark.parametrize(
    ("beginning", "lane", "make_job"), by_pairs((3, 1), (4, 2), (8, 1), (10, 1)), indirect=["make_job"]
)
def test_an_execution_that_begins_in_the_middle_tells_what_it_would_have_told(
    make_job: MakeJob,
    uninterrupted: list[tuple[Told, list[dict[str, torch.Tensor]]]],
    lane: "node_pb2.Lane.ValueType",
    beginning: tuple[int, int],
) -> None:
    done_steps, workers = beginning

    def job() -> SmallJob[SmallPlan]:
        return make_job(lane, wafers=2, shards=2, workers=workers)

    def first_states() -> list[dict[str, torch.Tensor]]:
        weights = (torch.full((INNER, OUTER), 0.01 * (shard + 1)) for shard in range(2))
        return [{f"w{shard}": weight, "count": torch.zeros(())} for shard, weight in enumerate(weights)]

    states = first_states()
    if not uninterrupted:
        of_all_steps = first_states()
        uninterrupted.append((run_epoch(job(), of_all_steps, 10, 0), of_all_steps))
    ((expected, expected_states),) = uninterrupted
    run_epoch(job(), states, done_steps, 0)
    told = run_epoch(job(), states, 10, done_steps)
    assert told.keys() == {(what, step) for what, step in expected if step > done_steps}
    for what, tensors in told.items():
        for tensor, value in zip(tensors, expected[what], strict=True):
            assert torch.equal(tensor, value), what
    for own, its in zip(states, expected_states, strict=True):
        assert all(torch.equal(own[name], its[name]) for name in its)


def test_a_job_goes_back_to_a_recovery_point(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shard of two is another process by then."""
    monkeypatch.setenv("WAFERBOX_RECOVERY_DIR", str(tmp_path / "recovery"))
    job = make_job(node_pb2.LANE_SHARED_MEMORY, shards=2)
    job.load(1)
    for client in write_states(job):
        client.close()
    job.start(1, num_steps=16, activation_steps=1, run_ahead_steps=2, recovery_point=1, last_recovery_point=3)
    for node in job.nodes.memoryx:
        assert node.expect("recovery_point_kept").recovery_point_kept.recovery_point == 1
        node.send(keep_recovery_point=node_pb2.KeepRecoveryPoint(epoch=7, step=4, recovery_point=8))
        node.send(keep_recovery_point=node_pb2.KeepRecoveryPoint(epoch=1, step=4, recovery_point=9))
        node.send(keep_recovery_point=node_pb2.KeepRecoveryPoint(epoch=1, step=5, recovery_point=2))
        node.send(stop=node_pb2.Stop(epoch=7))  # answered when what was sent before is known
        node.expect("stopped")
    expected = job.plan.expected(16)
    states = sum(tensor.nbytes for tensor in expected.weights[0]) + 4
    for step in range(1, 17):
        job.outputs(step)
        if step == 5:  # nobody can be at the end before the outputs of more steps are taken
            for node in job.nodes.memoryx:
                kept = node.expect("recovery_point_kept").recovery_point_kept
                assert kept.recovery_point == 2
                assert 0 < kept.nbytes < states
                assert 0 < kept.seconds < DEADLINE
    for node in job.nodes.memoryx:
        events = {node.expect_any("recovery_point_kept", "finished").WhichOneof("kind") for _ in range(2)}
        assert events == {"recovery_point_kept", "finished"}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "recovery" / "job-1").rglob("*")} == {0o700, 0o600}
    for node in (*job.nodes.swarmx, *job.nodes.wafers):
        node.expect("finished")
        node.send(keep_recovery_point=node_pb2.KeepRecoveryPoint(epoch=1, step=17, recovery_point=9))
        node.send(drop_recovery_points=node_pb2.DropRecoveryPoints(before=2))
    job.stop(1)

    job.nodes.memoryx[1].close()
    with ExitStack() as stack:
        management = FakeManagement()
        stack.callback(management.close)
        new = memoryx_node(management.address, StateSettings())
        new.start()
        stack.callback(new.close)
        job.nodes.memoryx[1] = AttachedNode(new.address, "memoryx-1", 1, job.lane)
        stack.callback(job.nodes.memoryx[1].close)
        # Between executions it is brought the plan without links, which the next execution need not bring again.
        restored = node_pb2.Load(epoch=2, memoryx=job.plan.memoryx(1), recovery_point=3)
        job.nodes.memoryx[1].send(load=restored)
        job.nodes.memoryx[1].expect("recovery_point_kept")
        assert not job.nodes.memoryx[1].expect("loaded").loaded.missing_states
        for point, steps in ((2, 5), (1, 0), (3, 16)):
            job.recovery_point = point
            assert not any(job.load(1 + point, brings_plan=False).values())
            for shard, node in enumerate(job.nodes.memoryx):
                client = StateClient(node, job.lane)
                found = client.read({f"w{shard}": (INNER, OUTER), "count": ()})
                client.close()
                assert found["count"] == steps
                torch.testing.assert_close(
                    found[f"w{shard}"],
                    expected.weights[steps - 1][shard] if steps else torch.full((INNER, OUTER), 0.01 * (shard + 1)),
                    rtol=1e-5,
                    atol=1e-5,
                )
            if point != 3:
                job.stop(1 + point)
        job.start(4, num_steps=1, activation_steps=1, run_ahead_steps=1)
        assert job.outputs(1)[1] == 17
        for node in job.nodes.all:
            node.expect("finished")
        job.stop(4)
        for node in job.nodes.memoryx:
            node.send(drop_recovery_points=node_pb2.DropRecoveryPoints(before=2**64 - 1))
            node.end()
            assert node.says_no_more()
        assert not (tmp_path / "recovery" / "job-1").exists()
        job.close_links()


def test_a_lost_recovery_point_is_named(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAFERBOX_RECOVERY_DIR", str(tmp_path / "recovery"))
    job = make_job(node_pb2.LANE_SHARED_MEMORY)
    job.recovery_point = 4
    (memoryx,) = job.nodes.memoryx
    memoryx.send(load=node_pb2.Load(epoch=1, memoryx=job.plan.memoryx(0), recovery_point=4))
    failed = memoryx.expect("failed").failed
    assert failed.kind == node_pb2.Failure.KIND_USER
    assert (failed.node, failed.peer) == ("memoryx-0", "")
    assert str(tmp_path / "recovery" / "job-1" / "memoryx-0" / "4") in failed.message
    assert "start the script again from its last checkpoint" in failed.message


@pytest.mark.parametrize("lane", LANES)
def test_outputs_leave_only_in_activation_steps(make_job: MakeJob, lane: "node_pb2.Lane.ValueType") -> None:
    job = make_job(lane, wafers=2)
    job.load(1)
    write_states(job)[0].close()
    job.start(1, num_steps=10, activation_steps=4, run_ahead_steps=1)
    expected = job.plan.expected(10)
    for step in (4, 8, 10):
        loss, count, _ = job.outputs(step)
        assert loss == pytest.approx(expected.losses[step - 1], rel=1e-4, abs=1e-3)
        assert count == step
    for node in job.nodes.all:
        node.expect("finished")


@pytest.mark.parametrize("lane", LANES)
def test_cluster_runs_ahead_only_up_to_the_bound(make_job: MakeJob, lane: "node_pb2.Lane.ValueType") -> None:
    job = make_job(lane)
    job.load(1)
    (client,) = write_states(job)
    job.start(1, num_steps=20, activation_steps=1, run_ahead_steps=3)
    assert job.outputs(1, ack=False)[1] == 1
    assert job.outputs(2, ack=False)[1] == 2
    assert job.outputs(3, ack=False)[1] == 3
    assert job.nodes.memoryx[0].says_nothing(0.3)
    assert not any(link.inbox for link in job.links.values())
    for step in (1, 2, 3):
        for link in (job.links["outputs", 0], job.links["memoryx", 0]):
            link.ack(step)
    for step in range(4, 21):
        job.outputs(step)
    job.nodes.memoryx[0].expect("finished")
    client.close()


@pytest.mark.parametrize("lane", LANES)
def test_snapshots_are_of_their_step(make_job: MakeJob, lane: "node_pb2.Lane.ValueType") -> None:
    job = make_job(lane)
    job.load(1)
    (client,) = write_states(job)
    job.start(1, num_steps=6, activation_steps=1, run_ahead_steps=5, checkpoint_steps=[2, 4])
    # It cannot end before its outputs are acknowledged.
    expected = job.plan.expected(6)
    shard = job.nodes.memoryx[0]
    for step in (2, 4):
        assert shard.expect("snapshot").snapshot.step == step
        assert client.refused("ReadState", ["w0"]).code() is not grpc.StatusCode.OK
        client = StateClient(shard, lane)
        found = client.read({"w0": (INNER, OUTER), "count": ()}, step=step)
        torch.testing.assert_close(found["w0"], expected.weights[step - 1][0], rtol=1e-5, atol=1e-5)
        assert found["count"] == step
        shard.send(release_snapshot=node_pb2.ReleaseSnapshot(step=step))
    for step in range(1, 7):
        job.outputs(step)
    shard.expect("finished")
    client.close()


@pytest.mark.parametrize("lane", LANES)
def test_state_that_does_not_exist_is_refused(make_job: MakeJob, lane: "node_pb2.Lane.ValueType") -> None:
    job = make_job(lane)
    job.load(1)
    shard = job.nodes.memoryx[0]
    for method, names, step in [
        ("ReadState", ["w0"], 0),  # nobody has written it
        ("ReadState", ["w0"], 3),  # no snapshot
        ("WriteState", ["nothing"], 0),
    ]:
        client = StateClient(shard, lane)
        assert client.refused(method, names, step).code() is grpc.StatusCode.NOT_FOUND
        client.close()


@pytest.mark.parametrize(("role", "lane", "make_job"), by_pairs("memoryx", "swarmx", "wafers"), indirect=["make_job"])
def test_lost_peer_is_a_failure_that_names_it(make_job: MakeJob, lane: "node_pb2.Lane.ValueType", role: str) -> None:
    job = make_job(lane, wafers=2)
    job.load(1)
    write_states(job)[0].close()
    job.start(1, num_steps=10**6, activation_steps=10**6, run_ahead_steps=8)
    victim = getattr(job.nodes, role)[0]
    neighbour = job.nodes.swarmx[0] if role != "swarmx" else job.nodes.wafers[1]
    victim.close()  # the node drops the job, and its links
    failure = neighbour.expect("failed").failed
    assert failure.kind == node_pb2.Failure.KIND_NODE
    assert failure.peer == victim.name
    assert failure.node == neighbour.name
    # A node whose job ended takes the next one.
    again = AttachedNode(victim.address, victim.name, 0, lane)
    again.close()


@pytest.mark.parametrize("lane", LANES)
def test_cancelling_is_silent(make_job: MakeJob, lane: "node_pb2.Lane.ValueType") -> None:
    job = make_job(lane)
    job.load(1)
    write_states(job)[0].close()
    job.start(1, num_steps=10**6, activation_steps=10**6, run_ahead_steps=8)
    for node in job.nodes.all:
        node.send(stop=node_pb2.Stop(epoch=1))
    for node in job.nodes.all:
        event = node.expect_any("stopped", "failed")
        assert event.WhichOneof("kind") == "stopped" or event.failed.kind == node_pb2.Failure.KIND_NODE


def test_a_node_works_for_one_job_at_a_time(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "ATTACHMENT", replace(deadlines.ATTACHMENT, previous_job=0.2))
    job = make_job(node_pb2.LANE_SHARED_MEMORY)
    address = job.nodes.wafers[0].address
    with pytest.raises(AssertionError, match="ended the stream"):
        AttachedNode(address, "wafer-0", 0, node_pb2.LANE_SHARED_MEMORY)


def test_a_plan_that_makes_no_sense_is_a_failure(make_job: MakeJob) -> None:
    job = make_job(node_pb2.LANE_SHARED_MEMORY)
    wafer = job.nodes.wafers[0]
    wafer.send(start=node_pb2.Start(epoch=9, num_steps=1))
    assert wafer.expect("failed").failed.kind == node_pb2.Failure.KIND_INTERNAL
    wafer.send(prepare_input=node_pb2.PrepareInput(loader="a"))
    assert "no input function" in wafer.expect("failed").failed.message
    wafer.send(load=node_pb2.Load(epoch=1, links=[]))
    failure = wafer.expect("failed").failed
    assert failure.kind == node_pb2.Failure.KIND_INTERNAL
    assert "Traceback" in failure.traceback
