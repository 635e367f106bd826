"""Small models trained through real processes: in float32 as plain torch does it, in bfloat16 as the simulation."""

import copy
import sys
from pathlib import Path

import batches
import pytest
import torch
from cluster_rig import RunningCluster
from test_precision import generated_updates  # noqa: F401
from torch import nn

import cerebras.pytorch as cstorch
from appliance.compiler.pipeline import Half, Precision
from cstorch._internal.tracing import random_counter

sys.path.insert(0, str(Path(__file__).parents[1] / "appliance"))
from model_training import CLIP, STEPS, TRAINED, Run, assert_equal, counter, plain, simulated, start, states_of

WAFERS, SHARDS, SEED = 2, 2, 0


def trained(name: str, folder: Path) -> Run:
    """What the cluster makes of it."""
    network, given = start(name, SEED)
    network = copy.deepcopy(network)
    random_counter.set(torch.tensor(counter(SEED)))
    config = cstorch.distributed.ClusterConfig(num_csx=WAFERS, max_wgt_servers=SHARDS)
    compiled = cstorch.compile(network, cstorch.backend("CSX", artifact_dir=folder, cluster_config=config))
    optimizer = TRAINED[name].optimizer(network.parameters())
    losses: list[torch.Tensor] = []

    @cstorch.trace
    def step(batch: object) -> torch.Tensor:
        loss = TRAINED[name].loss(compiled, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        return loss

    keep = cstorch.step_closure(lambda loss: losses.append(loss.detach().cpu()))
    loader = cstorch.utils.data.DataLoader(batches.input_fn, given)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=STEPS):
        keep(step(batch))
    return Run.of(losses, {key: value.detach().cpu() for key, value in states_of(name, network).items()})


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "rows"), [("gpt2", None), ("cnn", None), ("dlrm", None), ("clip", None), ("gpt2", 2), ("cnn", 3)]
)
def test_training_gives_what_plain_torch_gives(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, rows: int | None
) -> None:
    """rows: of a micro-batch; None: all that a wafer has."""
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    cstorch.backends.csx.performance.micro_batch_size = rows
    assert_equal(trained(name, tmp_path), plain(name, None, SEED), losses=1e-5, states=1e-4)


@pytest.mark.cluster
@pytest.mark.usefixtures("generated_updates")
def test_bfloat16_gives_what_the_simulation_gives(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    cstorch.amp.set_half_dtype("bfloat16")
    cstorch.amp.enable_mixed_precision()
    expected = simulated("gpt2", Precision(half=Half.BFLOAT16), WAFERS, SEED)
    assert_equal(trained("gpt2", tmp_path), expected, losses=1e-5, states=1e-5)
