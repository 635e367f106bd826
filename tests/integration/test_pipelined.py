"""Layer pipelined mode on a cluster: the numbers are plain PyTorch's, and whatever ends a job ends it at once."""

import copy
import json
import re
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cluster_rig import SCRIPTS, RunningCluster, StartCluster, StartScript, wait_for
from delayed_updates import train_with_delays, uses_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import cerebras.pytorch as cstorch
from appliance.compiler.artifacts import SUFFIX, read_plan
from cerebras.pytorch.utils.data import DataExecutor
from cstorch import backends
from cstorch.errors import CompileError
from waferbox.commands.cli import app
from wsc.v1 import management_pb2, node_pb2

pytestmark = pytest.mark.cluster

ROWS, STEPS = 8, 3
FAULTS = SCRIPTS / "faults.py"
FOR_EVER = 1_000_000  # steps
FAILURE_SECONDS = 10.0
PIPELINE = {"WAFERBOX_EXECUTION_STRATEGY": "pipeline"}


def numbers() -> DataLoader[Any]:
    rows = torch.randn(ROWS * STEPS, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=ROWS)


def text() -> DataLoader[Any]:
    tokens = torch.randint(50, (ROWS * STEPS, 9), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=ROWS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(16)
        self.attention = nn.Linear(16, 48)
        self.network = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in self.attention(self.before(x)).split(16, 2))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.network(x)


class SmallGPT(nn.Module):
    """Its embedding is also its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(8, 16)
        self.h = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(8, device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.head(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))


def squares(predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (predicted - wanted).pow(2).sum()


def entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Callable[[], DataLoader[Any]]]] = {
    "mlp": (mlp, squares, numbers),
    "gpt": (SmallGPT, entropy, text),
}


class Training:
    """A model on the cluster, and the losses of its steps."""

    def __init__(self, name: str, folder: Path, num_csx: int = 1) -> None:
        make, self._loss, self.input_fn = MODELS[name]
        config = cstorch.distributed.ClusterConfig(num_csx=num_csx)
        self.backend = cstorch.backend("CSX", artifact_dir=folder, cluster_config=config)
        torch.manual_seed(0)
        self.model = make()
        self.plain = copy.deepcopy(self.model)
        self.compiled = cstorch.compile(self.model, self.backend)
        self.optimizer = cstorch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self._plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.01, momentum=0.9)
        self.losses: list[float] = []
        self.expected: list[float] = []

    def run(self, *, trains: bool = True, **settings: Any) -> None:
        """An epoch, here and on the cluster."""
        report = cstorch.step_closure(lambda loss: self.losses.append(loss.item()))

        @cstorch.trace
        def step(batch: list[torch.Tensor]) -> torch.Tensor:
            rows, wanted = batch
            loss = self._loss(self.compiled(rows), wanted)
            if trains:
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            return loss

        self.model.train(trains)
        loader = cstorch.utils.data.DataLoader(self.input_fn)
        for batch in DataExecutor(loader, num_steps=STEPS, **settings):
            report(step(batch))
        for rows, wanted in self.input_fn():
            loss = self._loss(self.plain(rows), wanted)
            self.expected.append(loss.item())
            if trains:
                self._plain_optimizer.zero_grad()
                loss.backward()
                self._plain_optimizer.step()

    def check(self) -> None:
        """Losses and weights are those of plain PyTorch."""
        torch.testing.assert_close(torch.tensor(self.losses), torch.tensor(self.expected), rtol=1e-5, atol=1e-6)
        weights = dict(self.plain.named_parameters())
        for name, weight in self.model.state_dict().items():
            if name in weights:
                torch.testing.assert_close(weight.to("cpu"), weights[name].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("micro_batches", "replicas"), [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_weights_are_those_of_plain_pytorch(
    cluster: RunningCluster,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    micro_batches: int,
    replicas: int,
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    backends.csx.performance.execution_strategy = "pipeline"
    backends.csx.performance.num_replicas = replicas
    backends.csx.performance.micro_batch_size = ROWS // (micro_batches * replicas)
    training = Training(name, tmp_path)
    training.run()
    training.check()
    job = idle_job(cluster)
    assert sorted(node.member for node in cluster.nodes() if node.job == job.job) == ["wafer-0", "worker-0"]


def idle_job(cluster: RunningCluster) -> management_pb2.JobInfo:
    """The one whose execution is over, which management may hear after the script."""

    def idle() -> list[management_pb2.JobInfo]:
        return [job for job in cluster.jobs() if job.phase == management_pb2.JOB_PHASE_IDLE]

    wait_for(idle)
    (job,) = idle()
    return job


def linear(widths: tuple[int, ...] = (6, 16, 12, 8, 1)) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def test_asynchronous_updates_are_those_of_plain_pytorch_with_the_same_delays(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    monkeypatch.setitem(MODELS, "linear", (linear, squares, numbers))
    backends.csx.performance.execution_strategy = "pipeline"
    backends.csx.performance.micro_batch_size = ROWS // 4
    backends.csx.performance.asynchronous_updates = True
    training = Training("linear", tmp_path)
    plain = copy.deepcopy(training.plain)
    assert isinstance(plain, nn.Sequential)
    training.run()
    job = idle_job(cluster)
    (artifact,) = job.artifacts
    plan = read_plan(Path(f"{artifact}{SUFFIX}"))
    assert plan is not None
    rows, wanted = zip(*training.input_fn(), strict=True)
    parts = [each.chunk(4) for each in wanted]
    losses = train_with_delays(
        plain,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        rows,
        lambda result, step, part: squares(result, parts[step][part]),
        uses_of(plan.pipeline),
        4,
    )
    torch.testing.assert_close(training.losses, losses, rtol=1e-5, atol=1e-6)
    assert training.losses != pytest.approx(training.expected, rel=1e-3)  # those of one update a step
    weights = dict(plain.named_parameters())
    for name, weight in training.model.state_dict().items():
        torch.testing.assert_close(weight.to("cpu"), weights[name].detach(), rtol=1e-5, atol=1e-5)


def test_weights_move_between_executions_of_both_modes_and_so_do_checkpoints(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    training = Training("mlp", tmp_path)
    performance = backends.csx.performance
    training.run(checkpoint_steps=STEPS)
    for strategy, trains in (("pipeline", False), ("pipeline", True), ("weight_streaming", False), ("pipeline", True)):
        performance.execution_strategy = strategy
        training.run(trains=trains, checkpoint_steps=STEPS)
        training.check()
    saved = tmp_path / "checkpoint.mdl"
    cstorch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, saved)
    training.run(checkpoint_steps=STEPS)
    training.check()
    for strategy in ("weight_streaming", "pipeline"):
        performance.execution_strategy = strategy
        state = cstorch.load(saved)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        before = training.losses[-STEPS:]
        training.run(checkpoint_steps=STEPS)
        assert training.losses[-STEPS:] == pytest.approx(before, rel=1e-5)


def test_random_numbers_go_on_where_the_mode_changes(start_script: StartScript, cluster: RunningCluster) -> None:
    """Dropout draws the same numbers however the batch is cut, and whoever has the counter."""
    results = []
    for parts in (["weight_streaming:8"] * 3, ["pipeline:8", "pipeline:2", "weight_streaming:4"]):
        script = start_script(SCRIPTS / "modes.py", "artifacts", *parts, management=cluster.management)
        assert script.wait() == 0, script.errors
        results.append(json.loads(script.output))
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_several_wafers_are_refused(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    backends.csx.performance.execution_strategy = "pipeline"
    training = Training("mlp", tmp_path, num_csx=2)
    with pytest.raises(CompileError, match="on one wafer, not on num_csx=2"):
        training.run()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("role", "name"), [(node_pb2.ROLE_WAFER, "wafer-0"), (node_pb2.ROLE_WORKER, "worker-0")])
def test_a_node_that_dies_is_named(
    start_script: StartScript, tmp_path: Path, start_cluster: StartCluster, role: "node_pb2.Role.ValueType", name: str
) -> None:
    with start_cluster(tmp_path / "cluster", memoryx=0, swarmx=0) as cluster:
        arguments = ("runs", "--artifacts", "artifacts", "--num-steps", FOR_EVER)
        variables = {**PIPELINE, "WAFERBOX_MAX_NUM_RESTARTS": "0"}
        script = start_script(FAULTS, *arguments, management=cluster.management, **variables)
        script.wait_for_output("step 20\n")
        (victim,) = cluster.nodes(role)
        cluster.process_at(victim.address).kill()
        script.wait_for_error("NodeLostError: ", FAILURE_SECONDS)
        assert script.wait() == 1
        died = rf"NodeLostError: {name} \(pid {victim.process_id} at {re.escape(victim.address)}\) died"
        assert re.search(died, script.errors), script.errors


def test_a_trace_shows_regions_and_ctrl_c_cancels_the_job(
    start_script: StartScript, cluster: RunningCluster, tmp_path: Path
) -> None:
    script = start_script(
        FAULTS,
        *("runs", "--artifacts", "artifacts", "--num-steps", FOR_EVER),
        management=cluster.management,
        **PIPELINE,
    )
    script.wait_for_output("step 20\n")
    file = tmp_path / "trace.json"
    command = ["trace", cluster.jobs()[0].job, "--steps", "3", "--output", str(file)]
    done = CliRunner().invoke(app, [*command, "--management", cluster.management])
    assert done.exit_code == 0, done.output
    events = json.loads(file.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    done_in = {
        (processes[event["pid"]], rows[event["pid"], event["tid"]], event["name"])
        for event in events
        if event["ph"] == "X"
    }
    assert set(processes.values()) == {"wafer-0", "worker-0"}
    assert ("wafer-0", "0", "compute 0 backward") in done_in  # the region of the first layer
    script.process.send_signal(signal.SIGINT)
    script.wait()
    assert "KeyboardInterrupt" in script.errors
    wait_for(lambda: not [node for node in cluster.nodes() if node.job])
    wait_for(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_CANCELLED)


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("nan", "ValueError: the loss is nan"),
        ("runs_dry", "InputError"),
        ("raises", "sample 30 is not a picture"),
        ("has_wrong_label", "InputError: wafer-0: step 3, aten::nll_loss_forward at "),
    ],
)
def test_what_goes_wrong_in_a_step_is_told(
    start_script: StartScript, cluster: RunningCluster, mode: str, error: str
) -> None:
    script = start_script(FAULTS, mode, "--artifacts", "artifacts", management=cluster.management, **PIPELINE)
    assert script.wait() == 1
    assert error in script.errors
