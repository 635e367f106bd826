"""A job without nodes between two executions, released or preempted: the results stay the same."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from cluster_rig import RunningCluster, running_cluster, wait_for
from role_server import RoleServer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch
from cstorch._internal.backend.interface import Backend
from cstorch.errors import UsageError
from waferbox.rpc.server import make_channel
from waferbox.settings import IDLE_SECONDS
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import management_pb2, management_pb2_grpc

pytestmark = pytest.mark.cluster

STEPS = 4


def input_fn() -> DataLoader[Any]:
    rows = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=8)


Between: TypeAlias = Callable[[Backend], None]  # what happens between two executions


def own_nodes(cluster: RunningCluster, job: str) -> list[str]:
    """Returns the members that a job has."""
    return [node.member for node in cluster.nodes() if node.job == job and node.member]


def train(
    cluster: RunningCluster, folder: Path, between: Between | None = None, *, reads: bool = True
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains, leaves a loop, evaluates, and trains again; returns the losses, and the weights if it reads them."""
    config = cstorch.distributed.ClusterConfig(
        num_csx=2, mgmt_address=cluster.management, changes_need_checkpoint=False
    )
    losses: list[float] = []
    with cstorch.backend("CSX", artifact_dir=folder, cluster_config=config) as backend:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
        compiled = cstorch.compile(model, backend)
        optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.05)
        report = cstorch.step_closure(lambda loss: losses.append(loss.item()))

        @cstorch.trace
        def step(batch: list[torch.Tensor]) -> torch.Tensor:
            rows, wanted = batch
            loss = (compiled(rows) - wanted).pow(2).mean()
            if model.training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return loss

        def loop(steps: int = STEPS) -> None:
            loader = cstorch.utils.data.DataLoader(input_fn)
            executor = cstorch.utils.data.DataExecutor(loader, num_steps=STEPS)
            for batch in executor:
                report(step(batch))
                with pytest.raises(UsageError, match="inside the loop"):
                    backend.release()
                if executor.user_iteration == steps < STEPS:
                    break
            assert {"wafer-0", "wafer-1"} <= {node.member for node in cluster.nodes() if node.job}
            if between is not None:
                between(backend)

        loop()
        loop(steps=2)
        model.eval()
        loop()
        model.train()
        loop()
        weights = copy.deepcopy({name: value.to("cpu") for name, value in model.state_dict().items() if reads})
    assert cstorch.current_backend(raise_exception=False) is None
    wait_for(lambda: not any(node.job for node in cluster.nodes()))
    return losses, weights


def assert_same_as_whole(cluster: RunningCluster, folder: Path, between: Between) -> None:
    """Fails unless a training is the same to the bit without and with what happens between its executions."""
    expected, expected_weights = train(cluster, folder / "whole")
    losses, weights = train(cluster, folder / "interrupted", between)
    assert losses == expected
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(value, expected_weights[name]) for name, value in weights.items())


def test_a_job_that_was_released_continues_as_if_it_had_not(cluster: RunningCluster, tmp_path: Path) -> None:
    def release(backend: Backend) -> None:
        job = cluster.jobs()[0].job
        backend.release()
        wait_for(lambda: not own_nodes(cluster, job))
        backend.release()  # there is nothing to return

    assert_same_as_whole(cluster, tmp_path, release)


def test_a_job_that_was_preempted_continues_as_if_it_had_not(role_server: RoleServer, tmp_path: Path) -> None:
    roles = {"wafers": 2, "workers": 2, "memoryx": 2}
    variables = {IDLE_SECONDS.name: "0.2"}
    cache = tmp_path / "cache"
    with running_cluster(tmp_path / "cluster", cache, server=role_server, variables=variables, **roles) as cluster:
        channel = make_channel(cluster.management)
        stub = management_pb2_grpc.ManagementStub(channel)
        request = management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1, user="ada")

        def give_way(backend: Backend) -> None:
            """Waits until another job has nodes of this one, which is idle, and ends the other."""
            own = cluster.jobs()[0]
            other = stub.CreateJob(request).job
            wait_for(lambda: "wafer-0" in own_nodes(cluster, other))
            waits = [job for job in cluster.jobs() if job.job == own.job]
            assert [job.phase for job in waits] == [management_pb2.JOB_PHASE_IDLE]
            assert own_nodes(cluster, own.job) == []
            assert waits[0].idle_since > waits[0].started
            stub.CancelJob(management_pb2.CancelJobRequest(job=other))

        try:
            assert_same_as_whole(cluster, tmp_path, give_way)
            train(cluster, tmp_path / "ends preempted", give_way, reads=False)
            wait_for(lambda: not list((cache / "recovery").iterdir()))
        finally:
            channel.close()


def test_a_backend_of_the_cpu_has_nothing_to_return() -> None:
    with cstorch.backend("CPU") as backend:
        backend.release()
    with cstorch.backend("CPU") as other:
        assert other is not backend
        cstorch.close_backend()  # before the end of the block
    assert cstorch.current_backend(raise_exception=False) is None
