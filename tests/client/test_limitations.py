"""Every limitation that the seeds and the reference (3.3) tell of: the error, its text, and what to do.

One row for each; warnings are in test_warnings.py, those of reading values in all their forms in test_tracing_reads.py.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster, StartCluster
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import rnn
from user_script import Script, step_of_cluster

import cstorch
from cstorch._internal.backend import csx
from cstorch._internal.batch import check_batch
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import (
    ConfigurationError,
    CstorchWarning,
    InputError,
    StateError,
    TraceError,
    TraceTypeError,
    UsageError,
)
from cstorch.utils.data import DataExecutor, DataLoader

ITEM = r"The Cerebras backend does not yet support `aten::_local_scalar_dense\(Tensor self\) -> Scalar`"
DECAY = "SyncTensor called outside of MarkStep"


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    return start_cluster(step_of_cluster)


def optimizer_that_makes_state_in_its_step(script: Script) -> Callable[[Any], Any]:
    class Momentum(cstorch.optim.Optimizer):
        def preinitialize(self) -> None:
            pass

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                self.state[p]["momentum"].add_(p.grad * 0.001)
                p.data.sub_(self.state[p]["momentum"])

    script.optimizer = Momentum(script.model.parameters(), {})
    return script.train


def torch_schedule(script: Script) -> Callable[[Any], Any]:
    torch.optim.lr_scheduler.StepLR(script.optimizer, 1)
    return script.train


def two_models(script: Script) -> Callable[[Any], Any]:
    other = cstorch.compile(nn.Linear(2, 2))
    return lambda batch: script.train(batch) + other(batch).sum()


def raise_if_negative(script: Script) -> Callable[[Any], Any]:
    def bad_function(batch: torch.Tensor) -> torch.Tensor:
        if batch.max() < 0:
            raise ValueError("batch must have positive elements!")
        return script.train(batch)

    return bad_function


def rate_as_a_scalar(script: Script) -> Callable[[Any], Any]:
    step = cstorch.tensor(0)

    def function(batch: torch.Tensor) -> torch.Tensor:
        step.add_(1)
        rates = torch.where(step > 1000, step.float() * 0.0001, 0.0002)
        return torch.add(script.train(batch), batch.sum(), alpha=rates)  # type: ignore[call-overload]

    return function


def packed_rows(script: Script) -> Callable[[Any], Any]:
    lengths = torch.tensor([1, 1, 1, 1])
    return lambda batch: script.train(rnn.pack_padded_sequence(batch[:, None], lengths, batch_first=True).data)


def anomaly_detection(script: Script) -> Callable[[Any], Any]:
    def step(batch: torch.Tensor) -> torch.Tensor:
        with torch.autograd.detect_anomaly(check_nan=True):
            return script.train(batch)

    return step


# What a traced step must not do: the function of the step, made from the script; the error; what its text has.
IN_THE_STEP: dict[str, tuple[Callable[[Script], Callable[[Any], Any]], type[Exception], str]] = {
    "seed 000: if on a tensor": (raise_if_negative, TraceError, f"(?s)torch.where.*{ITEM}"),
    "seed 000: print": (lambda s: lambda b: print(s.train(b)), TraceError, ITEM),
    "seed 000: assert": (lambda s: lambda b: (_ for _ in ()).throw(OSError) if s.train(b) else 0, TraceError, ITEM),
    "seed 000: item": (lambda s: lambda b: s.train(b).item(), TraceError, f"(?s)step_closure.*{ITEM}"),
    "seed 000: to cpu": (lambda s: lambda b: s.train(b).to("cpu"), TraceError, "(?s)step_closure.*aten::_to_copy"),
    "3.3: numpy": (lambda s: lambda b: s.train(b).detach().numpy(), TraceTypeError, "step_closure"),
    "3.3: f-string": (lambda s: lambda b: f"{s.train(b)}", TraceError, ITEM),
    "seed 000: a traced tensor for a scalar": (rate_as_a_scalar, TraceError, f"{DECAY}.*tensor expression"),
    "seed 000: state made in the step": (optimizer_that_makes_state_in_its_step, TraceError, "preinitialize"),
    "seed 000: a schedule of torch": (torch_schedule, UsageError, "attached to SGD.*cstorch.optim.lr_scheduler"),
    "3.3: CPU and device tensors": (lambda s: lambda b: s.train(b + torch.ones(2)), TraceError, r"aten::add.*\.to\("),
    "packed sequences": (packed_rows, TraceError, r"sequences are packed.*padded sequences.*lengths - 1"),
    "anomaly detection": (anomaly_detection, TraceError, "anomaly detection reads the gradients.*out of the step"),
    "3.3: two compiled models": (two_models, UsageError, "two compiled models.*one torch.nn.Module"),
}


@pytest.mark.parametrize("row", IN_THE_STEP.values(), ids=IN_THE_STEP.keys())
def test_in_the_step(tmp_path: Path, row: tuple[Any, type[Exception], str]) -> None:
    make, error, text = row
    script = Script(tmp_path)
    step = cstorch.trace(make(script))
    with pytest.raises(error, match=text) as raised:
        script.loop(step)
    assert isinstance(raised.value, RuntimeError)


def test_anomaly_detection_of_the_script_is_off_in_its_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(tmp_path)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        script.loop(script.step)
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled()
    assert "has no effect in a traced step" in caplog.text


def test_a_scalar_and_a_tensor_from_outside_are_no_limitation(tmp_path: Path) -> None:
    """Seed 000: numbers, and tensors created outside tracing, work where a scalar is expected."""
    script = Script(tmp_path)
    pi: Any = torch.tensor(3.14)

    def step(b: torch.Tensor) -> torch.Tensor:
        return script.train(b.addcdiv(b, b, value=3.14) + b.addcdiv(b, b, value=pi))

    script.loop(cstorch.trace(step))


def leave_early(script: Script) -> None:
    """Without the recovery points with which the states of the last step can be had."""
    cstorch.backends.csx.cluster.max_num_restarts = 0
    for number, batch in enumerate(DataExecutor(DataLoader(lambda: [torch.ones(4, 2)]), num_steps=50)):
        script.step(batch)
        if number == 1:
            break


def weight_in_closure(script: Script) -> None:
    report = cstorch.step_closure(lambda weight: None)
    script.loop(lambda batch: (script.step(batch), report(script.model.weight)))


def second_graph(script: Script) -> None:
    steps = iter([script.step, cstorch.trace(lambda batch: script.compiled(batch).sum())])
    script.loop(lambda batch: next(steps)(batch), num_steps=2)


def change_without_checkpoint(script: Script) -> None:
    script.loop(script.step, checkpoint_steps=0)
    script.model.weight.data.mul_(0.9)
    script.loop(script.step)


def change_without_lazy_initialization(script: Script) -> None:
    with cstorch.backends.csx.debug(lazy_initialization=False):
        script.loop(script.step, checkpoint_steps=1)
        script.model.weight.data.mul_(0.9)
        script.loop(script.step)


def more_systems_later(script: Script) -> None:
    script.loop(script.step)
    script.backend.cluster_config.num_csx = 2
    script.loop(script.step)


def more_workers_later(script: Script) -> None:
    script.loop(script.step)
    script.backend.cluster_config = ClusterConfig(
        mgmt_address=script.backend.cluster_config.mgmt_address, num_workers_per_csx=3
    )
    script.loop(script.step)


def change_a_flag(script: Script) -> None:
    def body(batch: Any) -> None:
        script.step(batch)
        cstorch.backends.csx.precision.optimization_level = 0

    script.loop(body)


def read_off_a_checkpoint(script: Script) -> None:
    read = cstorch.step_closure(lambda: script.model.weight.cpu())
    script.loop(lambda batch: (script.step(batch), read()), num_steps=3, checkpoint_steps=2)


def metric_without_update(script: Script) -> None:
    float(cstorch.metrics.MeanMetric("mean"))


# What a script must not do around its steps.
AROUND_THE_STEP: dict[str, tuple[Callable[[Script], Any], type[Exception], str]] = {
    "3.3: outside an executor": (
        lambda s: s.step(torch.ones(4, 2)),
        UsageError,
        "Script.train.*inside `for batch in executor:`",
    ),
    "3.3: a second graph": (second_graph, UsageError, "a second @cstorch.trace function.*another DataExecutor"),
    "3.3: another type of backend": (
        lambda s: cstorch.backend("CPU"),
        UsageError,
        r"CSX backend already.*make it once",
    ),
    "3.3: an unknown backend": (lambda s: cstorch.backend("TPU"), ConfigurationError, "'TPU': use one of CPU, CSX"),
    "no GPU": (lambda s: cstorch.backend("GPU"), ConfigurationError, 'no GPU backend: use "CPU"'),
    "3.3: compile for another backend": (
        lambda s: cstorch.compile(nn.ReLU(), "CPU"),
        UsageError,
        "CSX backend already",
    ),
    "3.3: assign": (
        lambda s: s.compiled.load_state_dict(s.model.state_dict(), assign=True),
        UsageError,
        "leave assign out",
    ),
    "3.3: flags in an execution": (change_a_flag, UsageError, "set flags before the loop"),
    "3.3: a metric never updated": (metric_without_update, UsageError, "'mean' has no value yet"),
    "3.2: a weight for a closure": (
        weight_in_closure,
        UsageError,
        r"Attempting to get weight tensor .weight. in a step closure but this is not supported yet\. Please use "
        r'"cstorch\.save\(\)" API to save model weights',
    ),
    "seed 001: state off a checkpoint step": (
        read_off_a_checkpoint,
        StateError,
        "checkpoint_steps of the DataExecutor",
    ),
    "3.2: leaving early": (
        lambda s: [leave_early(s), s.loop(s.step)],  # type: ignore[func-returns-value]
        StateError,
        "is not available.*load a checkpoint",
    ),
    "seed 000: num_csx is global": (more_systems_later, UsageError, "num_csx is 2 and was 1.*locked in on the first"),
    "seed 000: workers are global": (more_workers_later, UsageError, "num_workers_per_csx is 3.*global across all"),
    "seed 000: state without a checkpoint": (
        change_without_checkpoint,
        StateError,
        "'state.model.weight'.*checkpoint_steps greater than 0",
    ),
    "seed 000: state without lazy initialization": (
        change_without_lazy_initialization,
        StateError,
        "lazy_initialization = True",
    ),
    "3.3: an executor in an executor": (
        lambda s: s.loop(lambda batch: s.loop(s.step)),
        UsageError,
        "another DataExecutor is being iterated",
    ),
    "3.3: CPU and device tensors": (
        lambda s: s.model.weight + torch.ones(2, 2),
        TraceError,
        r"aten::add.*\.to\(backend\.torch_device\)",
    ),
    # The input.
    "3.3: a plain loader": (
        lambda s: DataExecutor([torch.ones(1)]),  # type: ignore[arg-type]
        TypeError,
        r"cstorch.utils.data.DataLoader\(input_fn",
    ),
    "3.3: no function": (
        lambda s: DataLoader([torch.ones(1)]),  # type: ignore[arg-type]
        TypeError,
        "hand over the function itself",
    ),
    "3.3: no tensors": (lambda s: s.loop(s.step, ["text"]), InputError, "in which no tensor is found"),
    "3.3: nothing": (lambda s: s.loop(s.step, []), InputError, "ran dry after 0 batches"),
    "3.3: unknown length": (
        lambda s: DataExecutor(DataLoader(lambda: iter([torch.ones(4, 2)]))),
        ConfigurationError,
        "give the executor num_steps",
    ),
    "3.3: no steps": (lambda s: s.loop(s.step, num_steps=0), ConfigurationError, "num_steps must be at least 1"),
    "3.3: checkpoint_steps": (
        lambda s: s.loop(s.step, checkpoint_steps="all"),
        TypeError,
        "checkpoint_steps must be an int or a Schedule",
    ),
    "3.3: batch sizes differ": (
        lambda s: check_batch((torch.ones(4, 2), torch.ones(3)), num_csx=2),
        InputError,
        "different sizes in dimension 0: 4 and 3",
    ),
}


@pytest.mark.parametrize("row", AROUND_THE_STEP.values(), ids=AROUND_THE_STEP.keys())
def test_around_the_step(cluster: FakeCluster, tmp_path: Path, row: tuple[Any, type[Exception], str]) -> None:
    misuse, error, text = row
    script = Script(tmp_path, cluster)
    with pytest.raises(error, match=text):
        misuse(script)


def test_no_backend() -> None:
    with pytest.raises(UsageError, match=r'no backend yet: begin with cstorch.backend\("CSX"\)'):
        cstorch.backend()
    assert cstorch.current_backend(raise_exception=False) is None


def test_the_same_backend_again_is_the_same(tmp_path: Path) -> None:
    backend = cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    assert cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True) is cstorch.backend("csx") is backend
    with pytest.raises(UsageError, match="make it once, with all its settings"):
        cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=False)


def test_a_scripted_module_is_refused(cluster: FakeCluster, tmp_path: Path) -> None:
    Script(tmp_path, cluster)
    with pytest.raises(UsageError, match=r"compile the module that was given to torch\.jit\.script"):
        cstorch.compile(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))


def test_a_traced_function_runs_as_it_is_under_torch_compile(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.loop(torch.compile(cstorch.trace(script.train)))
    assert list(tmp_path.glob("**/cirh.mlir"))


def test_tensors_that_differ_in_dimension_0_are_for_one_system(cluster: FakeCluster, tmp_path: Path) -> None:
    script = Script(tmp_path, cluster, num_csx=2)
    with pytest.raises(InputError, match=r"different sizes in dimension 0: 4 and 3.*With num_csx=1"):
        script.loop(script.step, [(torch.ones(4, 2), torch.ones(3))])


@pytest.mark.parametrize("rows", [2, 4])
def test_a_batch_for_fewer_systems_than_there_are(cluster: FakeCluster, tmp_path: Path, rows: int) -> None:
    script = Script(tmp_path, cluster, num_csx=3)
    with pytest.raises(ConfigurationError, match=rf"{rows} rows.*num_csx=3 systems: choose a batch size"):
        script.loop(script.step, [torch.ones(rows, 2)])


def test_tensors_without_storage_are_written_by_safetensors(tmp_path: Path) -> None:
    script = Script(tmp_path)
    save_file(script.model.state_dict(), tmp_path / "model.safetensors")
    read = load_file(tmp_path / "model.safetensors")
    assert {name: value.tolist() for name, value in read.items()} == {
        name: value.cpu().tolist() for name, value in script.model.state_dict().items()
    }


def test_an_optimizer_that_steps_in_python_is_named_once(tmp_path: Path) -> None:
    """As in a loop that iterates a loader of torch, and no executor."""
    backend = cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    csx._warn_of_steps_in_python.__wrapped__()
    with backend.device:
        model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2, device=backend.torch_device)).sum().backward()
    with pytest.warns(CstorchWarning, match=r"test_limitations.py.*not on the cluster.*DataExecutor"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
