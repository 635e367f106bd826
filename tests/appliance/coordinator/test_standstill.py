"""Nodes that all wait for each other are noticed, and the job goes on in a new epoch."""

from collections.abc import Callable
from typing import Any

import pytest
from cluster_in_process import Client, ClusterInProcess

from appliance.coordinator.execution.failures import StandstillWatch
from waferbox.runtime import outbox
from wsc.v1 import observation_pb2

FULL = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}
NUM_STEPS = 20


def report(node: str, waits_for: str, step: int = 3, received: int = 10) -> observation_pb2.NodeReport:
    return observation_pb2.NodeReport(node=node, step=step, waits_for=waits_for, bytes={"received": received})


def stands_still(
    *rounds: list[observation_pb2.NodeReport],
    nodes: tuple[str, ...] = ("wafer-0", "memoryx-0"),
    client_behind_in: int | None = None,
) -> bool:
    """Whether a watch of two seconds finds a standstill in the last of these seconds, and in none before."""
    watch = StandstillWatch(2.0)
    found = []
    for number, reports in enumerate(rounds):
        for each in reports:
            watch.note_report(each.node, each)
        found.append(bool(watch.tick(nodes, is_client_behind=number == client_behind_in)))
    assert not any(found[:-1])
    return found[-1]


CIRCLE = [report("wafer-0", "memoryx-0"), report("memoryx-0", "wafer-0")]


def test_nodes_that_wait_for_each_other_for_too_long_stand_still() -> None:
    assert stands_still(CIRCLE, CIRCLE, CIRCLE)
    assert not stands_still(CIRCLE, CIRCLE)


@pytest.mark.parametrize(
    "other",
    [
        report("wafer-0", ""),
        report("wafer-0", "memoryx-0", step=4),
        report("wafer-0", "memoryx-0", received=11),
        report("wafer-0", "worker-0"),
    ],
    ids=["works", "has done a step", "has received something", "waits for another"],
)
def test_they_do_not_if_one_does_something_else_meanwhile(other: observation_pb2.NodeReport) -> None:
    changed = [other, CIRCLE[1]]
    assert not stands_still(CIRCLE, CIRCLE, changed)
    assert not stands_still(CIRCLE, changed, CIRCLE)


@pytest.mark.parametrize("number", [1, 2])
def test_they_do_not_if_the_client_runs_closures_meanwhile(number: int) -> None:
    assert not stands_still(CIRCLE, CIRCLE, CIRCLE, client_behind_in=number)


def test_time_counts_only_with_reports_of_all() -> None:
    assert not stands_still(CIRCLE, CIRCLE, CIRCLE[:1], [])
    assert not stands_still(CIRCLE, CIRCLE, CIRCLE, nodes=("wafer-0", "memoryx-0", "worker-0"))
    assert not stands_still(CIRCLE, CIRCLE, CIRCLE, nodes=())


def test_the_message_names_who_waits_for_whom_once() -> None:
    watch = StandstillWatch(2.0)
    messages = []
    for _ in range(3):
        for each in CIRCLE:
            watch.note_report(each.node, each)
        messages.append(watch.tick(["wafer-0", "memoryx-0"], is_client_behind=False))
    expected = "all nodes have waited for each other for 2 s: wafer-0 for memoryx-0, memoryx-0 for wafer-0"
    assert messages == ["", "", expected]
    # The next epoch runs already, and its reports have not come.
    assert not watch.tick(["wafer-0", "memoryx-0"], is_client_behind=False)


def test_a_job_whose_nodes_wait_for_each_other_goes_on(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAFERBOX_HANG_SECONDS", "2")
    monkeypatch.setattr(outbox, "BATCH_SECONDS", 0.05)
    times = [1]

    def wait_for_ever(context: Any, step: int) -> None:
        if step == 5 and times:
            times.clear()
            job: Any = next(node._service._job for module, node in cluster.nodes if module == "wafer")
            while True:  # until it is stopped
                job._job._hub._wait("memoryx-0")

    cluster.add(**FULL)
    cluster.behaviour.on_step["wafer-0"] = wait_for_ever
    one = client(max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    one.begin(NUM_STEPS)
    one.start()
    assert one.consume(NUM_STEPS) == list(range(1, NUM_STEPS + 1))
    one.receive("finished")
    (restart,) = cluster.jobs()[0].restarts
    assert restart.cause.startswith("all nodes have waited for each other for 2 s: ")
    assert "wafer-0 for memoryx-0" in restart.cause
