"""A job on a real cluster, looked at from outside: log, reports, the loss, and a trace of some of its steps."""

import json
from pathlib import Path

import pytest
from cluster_rig import SCRIPTS, StartCluster, StartScript, wait_for
from trace_arrows import arrows
from typer.testing import CliRunner

from waferbox.commands.cli import app
from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, observation_pb2, observation_pb2_grpc

pytestmark = pytest.mark.cluster

NUM_STEPS = 500


def test_a_job_can_be_watched_and_traced(
    start_script: StartScript, tmp_path: Path, start_cluster: StartCluster
) -> None:
    with start_cluster(tmp_path / "cluster") as cluster, make_channel(cluster.management) as channel:
        script = start_script(
            SCRIPTS / "watched.py", "--artifacts", "artifacts", "--num-steps", NUM_STEPS, management=cluster.management
        )
        script.wait_for_output(" 0x")  # the first loss
        job = cluster.jobs()[0].job
        stub = observation_pb2_grpc.ObservationStub(channel)
        watched = stub.WatchJob(observation_pb2.WatchJobRequest(job=job, follow=True), timeout=90.0)
        file = tmp_path / "trace.json"
        arguments = ["trace", job, "--steps", "4", "--output", str(file), "--management", cluster.management]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        (script.surroundings.folder / "go").touch()
        events = [event for lot in watched for event in lot.events]
        assert script.wait() == 0, script.errors
        wait_for(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_SUCCEEDED)

    losses = {
        int(step): float.fromhex(loss)
        for step, loss in (line.split() for line in script.output.splitlines() if " 0x" in line)
    }
    scalars = [event.scalar for event in events if event.HasField("scalar")]
    assert {scalar.name for scalar in scalars} == {"train/loss"}  # as the script calls it
    assert {scalars[0].step, scalars[-1].step} == {1, NUM_STEPS}
    assert {scalar.step: scalar.value for scalar in scalars} == {s.step: losses[s.step] for s in scalars}

    logs = {(event.log.node, event.log.message) for event in events if event.HasField("log")}
    assert {("worker-0", "the input function prints"), ("worker-0", "the input function logs")} <= logs
    assert ("wafer-0", f"epoch 1 begins: {NUM_STEPS} steps") in logs

    last = {event.report.node: event.report for event in events if event.HasField("report")}
    assert last.keys() >= {"memoryx-0", "wafer-0", "worker-0"}
    for node in ("memoryx-0", "wafer-0", "worker-0"):
        assert last[node].step == NUM_STEPS
        assert last[node].bytes["sent"] > 0
    assert last["wafer-0"].bytes["received"] > last["wafer-0"].bytes["sent"] > 0

    assert {node for node, report in last.items() if report.layers} == {"wafer-0"}
    layers = {each.layer: each for each in last["wafer-0"].layers}
    assert "" in layers
    assert len(layers) > 2
    assert all(each.compute > 0.0 for name, each in layers.items() if name)
    measured = sum(each.compute + each.wait + each.send for each in layers.values())
    total = last["wafer-0"].seconds["total"]
    assert 0.0 < measured < total  # of one step, and of all

    events_of_trace = json.loads(file.read_text())["traceEvents"]
    spans = [event for event in events_of_trace if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in events_of_trace if event["name"] == "process_name"}
    assert sorted(names.values()) == ["memoryx-0", "wafer-0", "worker-0"]
    steps = sorted({span["args"]["step"] for span in spans if names[span["pid"]] == "wafer-0"})
    assert steps == list(range(steps[0], steps[0] + 4))
    for step in steps:
        of_step = [span for span in spans if span["args"]["step"] == step]
        compute = [s for s in of_step if (names[s["pid"]], s["cat"]) == ("wafer-0", "compute")]
        update = [s for s in of_step if (names[s["pid"]], s["cat"]) == ("memoryx-0", "update")]
        assert compute
        assert update
        # A step begins with MemoryX sending weights, and ends with its last update; the wafer's work lies between.
        begin = min(s["ts"] for s in of_step if (names[s["pid"]], s["cat"]) == ("memoryx-0", "send"))
        end = max(s["ts"] + s["dur"] for s in of_step if names[s["pid"]] == "memoryx-0")
        assert begin < min(s["ts"] for s in compute)
        assert max(s["ts"] + s["dur"] for s in update) <= end
        assert min(s["ts"] for s in compute) < max(s["ts"] for s in update) <= end

    # A group can be followed from MemoryX to a wafer, and its gradients back: in each step, from every span on.
    followed = arrows(events_of_trace)
    assert all(arrow.steps[0] == arrow.steps[1] for arrow in followed)
    for step in steps:
        # A worker, which is some steps ahead, may have sent the batch of a step before it was asked to record.
        of_step = [arrow for arrow in followed if arrow.steps[0] == step and arrow.name != "batch"]
        ways = {
            (arrow.sender, arrow.receiver, arrow.name.split()[0]) for arrow in of_step if arrow.name != "step token"
        }
        assert ways == {("memoryx-0", "wafer-0", "weights"), ("wafer-0", "memoryx-0", "reduction")}
        for receiver in ("wafer-0", "memoryx-0"):
            taken = [
                span["name"]
                for span in spans
                if (span["args"]["step"], names[span["pid"]], span["cat"]) == (step, receiver, "wait")
                and span["name"] != "wait batch"
            ]
            assert sorted(taken) == sorted(arrow.receives for arrow in of_step if arrow.receiver == receiver)
