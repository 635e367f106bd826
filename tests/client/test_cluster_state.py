"""States on the cluster, as the client knows them."""

from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster, FakeShard

from cstorch._internal.log import SlowWork
from cstorch._internal.session import cluster_state
from cstorch._internal.session.cluster_state import ClusterState
from cstorch._internal.tracing import Cell
from wsc.v1 import coordinator_pb2, plan_pb2


def test_a_state_that_has_another_name_in_the_next_step_is_read_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster(written=[[]])
    monkeypatch.setattr(cluster_state, "ShardConnection", lambda *_: FakeShard(cluster))
    job: Any = None
    state, cell = ClusterState("auto", job), Cell((2,), torch.float32)
    cell.write(torch.tensor([1.0, 2.0]))
    kind = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=[2])
    for name in ("before", "after"):
        placed = coordinator_pb2.StatePlacement(name=name, type=kind, shard=0)
        unsent = state.unsent({name: cell}, [name])
        state.send({name: cell}, [placed], [coordinator_pb2.StateShard(shard=0)], unsent, {}, SlowWork("Sending"))
        state.begin([name])
        state.settle(is_saved=True)
        assert cell.remote
    assert cluster.live["after"].tolist() == [1.0, 2.0]
