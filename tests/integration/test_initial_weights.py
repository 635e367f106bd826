"""Weights whose initialisation runs in MemoryX, on a running cluster."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from cluster_rig import RunningCluster
from torch import nn
from torch.nn import functional as F

import cerebras.pytorch as cstorch
from cstorch._internal.session import cluster_state
from cstorch._internal.session.staging import initial_states
from cstorch._internal.tracing import cell_of
from wsc.v1 import node_pb2

pytestmark = pytest.mark.cluster

WIDE = 4000  # times the features or the classes, more than what stays in memory


def make_model() -> nn.Sequential:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(parity.FEATURES, WIDE), nn.ReLU(), nn.Linear(WIDE, parity.CLASSES))
    model.register_buffer("scale", torch.rand(WIDE, parity.FEATURES).tril())
    nn.init.trunc_normal_(model.get_parameter("0.weight"), std=0.05)
    nn.init.kaiming_normal_(model.get_parameter("2.weight"))
    return model


@pytest.mark.parametrize("num_shards", [1, 2])
def test_weights_made_in_memoryx_are_those_of_the_cpu(
    num_shards: int, cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    told: dict[str, node_pb2.InitialState] = {}
    tell = initial_states

    def spy(*arguments: Any) -> Sequence[node_pb2.InitialState]:
        states = tell(*arguments)
        told.update({state.name: state for state in states})
        return states

    monkeypatch.setattr(cluster_state, "initial_states", spy)
    config = cstorch.distributed.ClusterConfig(num_csx=2, max_wgt_servers=num_shards)
    backend = cstorch.backend("CSX", artifact_dir=tmp_path, cluster_config=config)
    with backend.device:
        model = make_model()
    # The scale is read by the forward pass, so it is a state that never changes.
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    loader = cstorch.utils.data.DataLoader(parity.input_fn, 24)
    executor = cstorch.utils.data.DataExecutor(loader, num_steps=1)

    @cstorch.trace
    def step(batch: Any) -> torch.Tensor:
        features, labels = batch
        weight, scale = model.get_parameter("0.weight"), model.get_buffer("scale")
        hidden = model[1](F.linear(features, weight * scale, model.get_parameter("0.bias")))
        loss = F.cross_entropy(compiled.module[2](hidden), labels)
        loss.backward()
        optimizer.step()
        return loss

    for batch in executor:
        step(batch)

    staged = {name for name, state in told.items() if not state.HasField("program")}
    weights = {"state.model.0.weight", "state.model.2.weight", "state.model.scale"}
    # With two shards a guess decides where a value is staged; what was staged on the wrong one is made anew.
    assert staged <= weights
    assert num_shards == 2 or staged == weights
    moments = {name for name in told if "exp_avg" in name}
    assert len(moments) == 4  # of both weights: they are made there too, of zeros
    expected = make_model()
    for name, value in expected.state_dict().items():
        found = model.state_dict()[name]
        if name != "0.bias" and name != "2.bias":
            assert cell_of(found).remote, name
        assert torch.equal(found.cpu(), value), name
