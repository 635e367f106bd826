"""How often a job goes on: so many deaths in a row as max_num_restarts says; each new recovery point begins anew."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from cluster_in_process import Client, ClusterInProcess

from appliance.coordinator import serving
from appliance.coordinator.recovery.restarts import RestartLimit
from waferbox import deadlines, settings
from waferbox.host.clock import SystemClock
from wsc.v1 import management_pb2, node_pb2

FULL = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}
MAX_NUM_RESTARTS = 3


class Run:
    """An execution whose wafer dies again and again."""

    def __init__(self, cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
        self._cluster = cluster
        cluster.add(**FULL)
        self.job = client(max_num_restarts=MAX_NUM_RESTARTS, run_ahead_steps=4)
        self.job.compile()
        for name in ("wafer-0", "worker-0"):  # which nothing else holds back
            cluster.behaviour.on_step[name] = self._stay_near
        self.job.begin(1_000_000)
        self.job.start()
        self._begun = 0
        self._starts = 1

    def _stay_near(self, context: object, step: int) -> None:
        """Not far beyond the steps whose outputs have left, so that recovery points are due soon."""
        deadline = time.monotonic() + 0.2  # else it could not be stopped
        sent = self._cluster.behaviour.sent
        while step > (sent[-1] if sent else 0) + 4 and time.monotonic() < deadline:
            time.sleep(0.01)

    def wait_until_it_runs(self) -> None:
        self._cluster.until(lambda: len(self._cluster.behaviour.starts.get("wafer-0", [])) == self._starts)
        # The coordinator sees it a little later: who died by then would be of the same restart.
        self._cluster.until(lambda: self._cluster.jobs()[0].num_restarts == self._starts - 1)

    def kill_wafer(self) -> str:
        """Once it runs; returns the victim's address."""
        self.wait_until_it_runs()
        self._starts += 1
        index = next(index for index, (module, _) in enumerate(self._cluster.nodes) if module == "wafer")
        address: str = self._cluster.nodes[index][1].address
        self._cluster.kill(index)
        self._cluster.add(wafer=1)
        return address

    def get_further(self) -> None:
        """Until there is a new recovery point; none are kept from then on."""
        self.wait_until_it_runs()
        behaviour = self._cluster.behaviour
        before = len(behaviour.dropped.get("memoryx-0", []))
        behaviour.keeps_points = True
        while len(behaviour.dropped.get("memoryx-0", [])) == before:
            self._begun += 1
            self.job.receive_outputs()
            self.job.consumed(self._begun)
        behaviour.keeps_points = False


@pytest.fixture
def run(cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv(settings.RECOVERY_SECONDS.name, "0")
    monkeypatch.setattr(deadlines, "RECOVERY", replace(deadlines.RECOVERY, point_lead=0.0))
    monkeypatch.setattr(serving, "TICK_SECONDS", 0.05)
    monkeypatch.setenv(settings.HANG_SECONDS.name, "1200")  # a third of them in ticks
    return Run(cluster, client)


def assert_ends_with(run: Run, cluster: ClusterInProcess, victims: list[str]) -> None:
    """With these causes listed, and no others."""
    failure = run.job.failure()
    assert failure.kind == node_pb2.Failure.KIND_NODE
    assert f"{len(victims)} times without progress, and max_num_restarts is 3:" in failure.message
    *listed, remedy = failure.message.splitlines()[1:]
    assert "start the script again from its last checkpoint" in remedy
    assert len(listed) == len(victims)
    for number, (line, victim) in enumerate(zip(listed, victims, strict=True), 1):
        assert line.startswith(f"  {number}. wafer-0 (pid ")
        assert victim in line
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED)


def test_the_fourth_of_five_deaths_ends_the_job_and_all_four_are_listed(run: Run, cluster: ClusterInProcess) -> None:
    run.get_further()
    assert_ends_with(run, cluster, [run.kill_wafer() for _ in range(MAX_NUM_RESTARTS + 1)])
    cluster.kill(len(cluster.nodes) - 1)  # the fifth is nobody's business any more


def test_the_count_begins_anew_when_the_job_has_got_further(run: Run, cluster: ClusterInProcess) -> None:
    for _ in range(2):
        run.get_further()
        for _ in range(MAX_NUM_RESTARTS):
            run.kill_wafer()
    run.get_further()
    assert_ends_with(run, cluster, [run.kill_wafer() for _ in range(MAX_NUM_RESTARTS + 1)])


def limit_of(most: int, causes: list[str], progress: object) -> RestartLimit:
    return RestartLimit(most, causes, progress, lambda causes: None, SystemClock())


def test_nodes_that_are_missed_one_after_the_other_count_as_one_restart() -> None:
    limit = limit_of(1, ["the coordinator died"], progress=None)
    limit.add({"wafer-0": "wafer-0 died"}, None)
    limit.add({"memoryx-0": "memoryx-0 died", "swarmx-0": "swarmx-0 died"}, None)
    limit.add({"worker-0": "worker-0 died"}, None)
    missed = "wafer-0 died; memoryx-0 died; swarmx-0 died; worker-0 died"
    assert limit.causes == ["the coordinator died", missed]
    assert limit.failure().message.splitlines()[1:3] == ["  1. the coordinator died", f"  2. {missed}"]


def test_equal_causes_in_a_row_are_listed_once() -> None:
    limit = limit_of(3, ["wafer-0 died", "no link", "no link", "no link", "wafer-0 died"], progress=None)
    listed = limit.failure().message.splitlines()[1:4]
    assert listed == ["  1. wafer-0 died", "  2. to 4. no link", "  5. wafer-0 died"]


def test_a_node_that_dies_again_counts_again() -> None:
    limit = limit_of(1, [], progress=None)
    for name in ("wafer-0", "worker-0", "wafer-0"):
        assert not limit.is_reached
        limit.add({name: f"{name} died"}, None)
    assert limit.causes == ["wafer-0 died; worker-0 died", "wafer-0 died"]
    assert limit.is_reached


def test_deaths_that_are_far_apart_count_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "RECOVERY", replace(deadlines.RECOVERY, one_restart=-1.0))
    limit = limit_of(1, [], progress=None)
    for name in ("wafer-0", "worker-0"):
        limit.add({name: f"{name} died"}, None)
    assert limit.is_reached


def test_a_death_after_progress_is_no_part_of_a_restart_before_it() -> None:
    limit = limit_of(1, [], progress=1)
    limit.add({"wafer-0": "wafer-0 died"}, 1)
    limit.add({"worker-0": "worker-0 died"}, 2)
    assert limit.causes == ["worker-0 died"]
