"""Every limitation that the seeds and the reference (3.3) tell of: the error or warning, its text, and what to do.

One row for each; those of reading values in all their forms are in test_tracing_reads.py.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster, StartCluster, State
from torch import nn

import cstorch
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ConfigurationError, InputError, StateError, TraceError, TraceTypeError, UsageError
from cstorch.utils.data import DataExecutor, DataLoader

ITEM = r"The Cerebras backend does not yet support `aten::_local_scalar_dense\(Tensor self\) -> Scalar`"
DECAY = "SyncTensor called outside of MarkStep"


def step_of_cluster(state: State, step: int) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(float(step)) for name in ("output_values_0", "output_loss", "output_value")}


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    return start_cluster(step_of_cluster)


class Script:
    """A user's script: a model, an optimizer, and loops."""

    def __init__(self, folder: Path, cluster: FakeCluster | None = None, **settings: Any) -> None:
        address = cluster.address if cluster is not None else None
        config = ClusterConfig(mgmt_address=address, num_csx=settings.pop("num_csx", 1))
        self.backend = cstorch.backend(
            "CSX", artifact_dir=folder, cluster_config=config, validate_only=cluster is None, **settings
        )
        self.model = nn.Linear(2, 2)
        self.compiled = cstorch.compile(self.model)
        self.optimizer: torch.optim.Optimizer = cstorch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train(self, batch: Any) -> torch.Tensor:
        loss = self.compiled(batch).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def loop(self, body: Callable[..., Any], data: Any = None, num_steps: int = 1, **settings: Any) -> None:
        batches = [torch.ones(4, 2)] if data is None else data
        for batch in DataExecutor(DataLoader(lambda: batches), num_steps=num_steps, **settings):
            body(batch)

    def step(self, batch: Any) -> torch.Tensor:
        """A step that trains, traced."""
        if not hasattr(self, "_step"):
            self._step = cstorch.trace(self.train)
        return self._step(batch)


def optimizer_that_makes_state_in_its_step(script: Script) -> Callable[[Any], Any]:
    class Momentum(cstorch.optim.Optimizer):
        def preinitialize(self) -> None:
            pass

        def step(self, closure: Any = None) -> None:
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
        rates = torch.where(step > 1000, step.float() * 0.0001, 0.0002)
        return torch.add(script.train(batch), batch.sum(), alpha=rates)

    return function


# What a traced step must not do: the function of the step, made from the script; the error; what its text has.
IN_THE_STEP: dict[str, tuple[Callable[[Script], Callable[[Any], Any]], type[Exception], str]] = {
    "seed 000: if on a tensor": (raise_if_negative, TraceError, f"(?s){ITEM}.*torch.where"),
    "seed 000: print": (lambda s: lambda b: print(s.train(b)), TraceError, ITEM),
    "seed 000: assert": (lambda s: lambda b: (_ for _ in ()).throw(OSError) if s.train(b) else 0, TraceError, ITEM),
    "seed 000: item": (lambda s: lambda b: s.train(b).item(), TraceError, f"(?s){ITEM}.*step_closure"),
    "seed 000: to cpu": (lambda s: lambda b: s.train(b).to("cpu"), TraceError, "(?s)aten::_to_copy.*step_closure"),
    "3.3: numpy": (lambda s: lambda b: s.train(b).detach().numpy(), TraceTypeError, "step_closure"),
    "3.3: f-string": (lambda s: lambda b: f"{s.train(b)}", TraceError, ITEM),
    "seed 000: a traced tensor for a scalar": (rate_as_a_scalar, TraceError, f"{DECAY}.*tensor expression"),
    "seed 000: state made in the step": (optimizer_that_makes_state_in_its_step, TraceError, "preinitialize"),
    "seed 000: a schedule of torch": (torch_schedule, UsageError, "attached to SGD.*cstorch.optim.lr_scheduler"),
    "3.3: CPU and device tensors": (lambda s: lambda b: s.train(b + torch.ones(2)), TraceError, r"aten::add.*\.to\("),
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


def test_a_scalar_and_a_tensor_from_outside_are_no_limitation(tmp_path: Path) -> None:
    """Seed 000: numbers, and tensors created outside tracing, work where a scalar is expected."""
    script = Script(tmp_path)
    pi = torch.tensor(3.14)
    script.loop(cstorch.trace(lambda b: script.train(b.addcdiv(b, b, value=3.14) + b.addcdiv(b, b, value=pi))))


def leave_early(script: Script) -> None:
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
    "3.3: a checkpoint outside": (
        lambda s: cstorch.checkpoint_closure(lambda: None)(),
        UsageError,
        "inside `for batch in executor:`",
    ),
    "3.2: leaving early": (
        lambda s: (leave_early(s), s.loop(s.step)),
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
        lambda s: DataExecutor([torch.ones(1)]),
        TypeError,
        r"cstorch.utils.data.DataLoader\(input_fn",
    ),
    "3.3: no function": (lambda s: DataLoader([torch.ones(1)]), TypeError, "hand over the function itself"),
    "3.3: no tensors": (lambda s: s.loop(s.step, ["text"]), InputError, "a batch is a nest of tensors"),
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
        lambda s: s.loop(s.step, [(torch.ones(4, 2), torch.ones(3))]),
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


@pytest.mark.parametrize("rows", [2, 4])
def test_a_batch_for_fewer_systems_than_there_are(cluster: FakeCluster, tmp_path: Path, rows: int) -> None:
    script = Script(tmp_path, cluster, num_csx=3)
    with pytest.raises(ConfigurationError, match=rf"{rows} rows.*num_csx=3 systems: choose a batch size"):
        script.loop(script.step, [torch.ones(rows, 2)])


# Warnings: what a script may do, and what it may not know of it.


def test_a_python_value_that_changes_is_warned_of_once(cluster: FakeCluster, tmp_path: Path) -> None:
    """Seed 001: variables that are not torch tensors will only see their first value."""
    script = Script(tmp_path, cluster)

    @cstorch.trace
    def step(batch: Any, settings: dict[str, Any], number: float) -> torch.Tensor:
        return script.train(batch) * number

    numbers = iter([(1, 0.5), (2, 0.5), (3, 0.7)])

    def body(batch: Any) -> None:
        count, number = next(numbers)
        step(batch, {"count": count, "same": None}, number=number)

    with pytest.warns(UserWarning, match="is 2, and was 1 in the first step.*must be a tensor") as caught:
        script.loop(body, num_steps=3)
    (message,) = [str(item.message) for item in caught if "first step" in str(item.message)]
    assert r"test_limitations.py:" in message
    assert "settings['count']" in message


@pytest.mark.parametrize("value", [None, True, "text", float("nan"), 3])
def test_python_values_that_stay_are_not_warned_of(cluster: FakeCluster, tmp_path: Path, value: Any) -> None:
    script = Script(tmp_path, cluster)
    step = cstorch.trace(lambda batch, value: script.train(batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.loop(lambda batch: step(batch, value), num_steps=3)


def test_an_evaluation_in_training_mode_is_warned_of(tmp_path: Path) -> None:
    script = Script(tmp_path)
    evaluate = cstorch.trace(lambda batch: script.compiled(batch).sum())
    with pytest.warns(UserWarning, match=r"in training mode.*model.eval\(\)"):
        script.loop(evaluate)
    script.model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.loop(evaluate)


def test_an_optimizer_of_torch_is_warned_of(tmp_path: Path) -> None:
    """Seed 001: the optimizers of core PyTorch are not supported."""
    script = Script(tmp_path)
    script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="SGD is an optimizer of torch.*Use the optimizer of the same name"):
        script.loop(cstorch.trace(script.train))


def test_training_after_an_evaluation_is_warned_of(cluster: FakeCluster, tmp_path: Path) -> None:
    """Seed 000: the first compile should be the most resource-intensive job: training must come before eval."""
    script = Script(tmp_path, cluster)
    evaluate = cstorch.trace(lambda batch: script.compiled(batch).sum())
    script.model.eval()
    script.loop(evaluate)
    script.model.train()
    with pytest.warns(UserWarning, match="compiled after an evaluation.*train before you evaluate"):
        script.loop(script.step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.loop(script.step)


def test_steps_and_activations_are_warned_of(tmp_path: Path) -> None:
    Script(tmp_path)
    loader = DataLoader(lambda: [torch.ones(4, 2)])
    with pytest.warns(UserWarning, match="with validate_only one step is traced: num_steps=9 becomes 1"):
        DataExecutor(loader, num_steps=9)
    cstorch.close_backend()
    cstorch.backend("CPU", artifact_dir=tmp_path)
    with pytest.warns(UserWarning, match="activation_steps=4 becomes 2: every checkpoint step is an activation step"):
        DataExecutor(loader, num_steps=9, checkpoint_steps=6, activation_steps=4)
