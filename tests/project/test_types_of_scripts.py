"""A user's script type-checks under mypy and pyright with their defaults, and a misspelt setting does not."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch import nn

import cerebras.pytorch as cstorch
import cerebras.pytorch.distributed as dist
from cerebras.pytorch.nn.functional import one_hot
from cerebras.pytorch.utils.data import DataExecutor, DataLoader


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)


class Doubling(cstorch.optim.lr_scheduler.PolynomialLR):
    def __init__(self, own: torch.optim.Optimizer, rate: float) -> None:
        super().__init__(own, rate, 2 * rate, total_iters=3)


def input_fn(batch_size: int) -> torch.utils.data.DataLoader:
    dataset = cstorch.utils.data.SyntheticDataset((torch.ones(8), torch.ones((), dtype=torch.int64)), num_samples=64)
    return torch.utils.data.DataLoader(dataset, batch_size)


cluster_config = dist.ClusterConfig(num_csx=1, job_labels=["model=small"])
backend = cstorch.backend("CSX", artifact_dir="model_dir", cluster_config=cluster_config)
cstorch.backends.csx.precision.optimization_level = 1
cstorch.amp.enable_mixed_precision()
with backend.device:
    module = Model()
model = cstorch.compile(module, backend)
optimizer = cstorch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
schedule = cstorch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        Doubling(optimizer, 1e-4),
        cstorch.optim.lr_scheduler.CosineDecayLR(
            optimizer, initial_learning_rate=1e-3, end_learning_rate=1e-5, total_iters=90
        ),
    ],
    milestones=[10],
)
decay: cstorch.optim.weight_decay_scheduler.ConstantWD = cstorch.optim.weight_decay_scheduler.ConstantWD(optimizer, 0.1)
scaler = cstorch.amp.GradScaler(loss_scale="dynamic")
accuracy = cstorch.metrics.AccuracyMetric(name="accuracy")


@cstorch.trace
def training_step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, labels)
    cstorch.amp.optimizer_step(loss, optimizer, scaler, max_gradient_norm=1.0)
    schedule.step()
    decay.step()
    accuracy(labels=labels, predictions=outputs.argmax(-1))
    return loss


@cstorch.step_closure
def log_loss(loss: torch.Tensor, step: int) -> None:
    print(step, loss.item(), schedule.get_last_lr()[0])


@cstorch.checkpoint_closure
def save_checkpoint(step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    cstorch.save(state, f"model_dir/checkpoint_{step}.mdl")


dataloader = DataLoader(input_fn, batch_size=16)
executor = DataExecutor(dataloader, num_steps=10, checkpoint_steps=5)
for inputs, labels in executor:
    log_loss(training_step(inputs, labels), executor.user_iteration)
    save_checkpoint(executor.user_iteration)
model.load_state_dict(cstorch.load("model_dir/checkpoint_10.mdl", map_location="cpu")["model"])
print(float(accuracy), executor.profiler.rate_tracker.global_rate)
"""

# A line of each is wrong, and nothing else.
WRONG = {
    "setting_of_the_backend": 'cstorch.backend("CSX", cluster_confg=cstorch.distributed.ClusterConfig())',
    "field_of_the_cluster": "cstorch.distributed.ClusterConfig(num_csxs=2)",
    "setting_of_an_optimizer": "cstorch.optim.SGD(model.parameters(), lr=0.1, momentm=0.9)",
    "setting_of_a_schedule": "cstorch.optim.lr_scheduler.ConstantLR(optimizer, learning_rat=0.1)",
    "setting_of_the_executor": "cstorch.utils.data.DataExecutor(dataloader, num_stps=10)",
    "setting_of_a_scaler": 'cstorch.amp.GradScaler(loss_scal="dynamic")',
    "flag": "cstorch.backends.csx.precision.optimization_levl = 1",
}

CHECKERS = {
    "mypy": ("mypy", "--config-file="),
    "pyright": ("basedpyright", f"--pythonpath={sys.executable}"),
}


@pytest.mark.parametrize(
    "package", ["cerebras", "cerebras_appliance", "cerebras_pytorch", "cerebras_torch", "cstorch", "waferbox"]
)
def test_type_checkers_read_the_types_of_the_package(package: str) -> None:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).with_name("py.typed").exists()


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_script_has_no_error_and_a_misspelt_name_is_one(
    checker: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    module, *arguments = CHECKERS[checker]
    if checker == "mypy":
        # mypy reads torch in 15 s, and keeps what it has read, with the digest of each file, for the next run.
        assert pytestconfig.cache is not None
        arguments.append(f"--cache-dir={pytestconfig.cache.mkdir('mypy')}")
    assert find_spec(module) is not None, f"install the dev extra: there is no {module}"
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    (tmp_path / "right.py").write_text(SCRIPT)
    for name, line in WRONG.items():
        (tmp_path / f"{name}.py").write_text(f"{SCRIPT}{line}\n")
    files = ["right.py", *(f"{name}.py" for name in WRONG)]
    command = [sys.executable, "-m", module, *arguments, *files]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = [line for line in result.stdout.splitlines() if "error:" in line or " - error" in line]
    assert result.returncode == 1, result.stdout + result.stderr
    found = {name: [error for error in errors if f"{name}.py" in error] for name in ("right", *WRONG)}
    assert found.pop("right") == []
    last = len(SCRIPT.splitlines()) + 1
    for name, lines in found.items():
        assert lines, f"{checker} accepts {name}: {WRONG[name]}"
        assert all(f"{name}.py:{last}" in line for line in lines), lines
