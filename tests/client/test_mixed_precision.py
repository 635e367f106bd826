"""How a script says in which precision its steps compute, that the cluster hears of it, and what the CPU does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster
from halved_weight import Setup, run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras_pytorch
import cerebras_pytorch.experimental
import cstorch
from cstorch.errors import ConfigurationError, UsageError
from wsc.v1 import plan_pb2


def test_the_defaults() -> None:
    assert not cstorch.amp.mixed_precision()
    assert cstorch.amp.get_half_dtype() is torch.float16
    assert cstorch.backends.csx.precision.optimization_level == 1


@pytest.mark.parametrize(
    ("value", "name", "dtype"),
    [
        ("float16", "float16", torch.float16),
        ("bfloat16", "bfloat16", torch.bfloat16),
        ("cbfloat16", "cbfloat16", torch.float16),
        (torch.bfloat16, "bfloat16", torch.bfloat16),
    ],
)
def test_the_half_is_set_by_name_or_type(value: Any, name: str, dtype: torch.dtype) -> None:
    assert cstorch.amp.set_half_dtype(value) is dtype
    assert cstorch.amp.get_half_dtype() is dtype
    assert cstorch.amp.get_half_dtype_str() == name
    assert not cstorch.amp.mixed_precision()


@pytest.mark.parametrize("value", ["float32", torch.float32, "half"])
def test_another_half_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="use one of float16, bfloat16, cbfloat16"):
        cstorch.amp.set_half_dtype(value)


@pytest.mark.parametrize("level", [-1, 3, True, "1", 1.0])
def test_another_level_is_refused(level: object) -> None:
    with pytest.raises(ConfigurationError, match="must be one of 0, 1, 2, not"):
        cstorch.backends.csx.precision.optimization_level = level
    assert cstorch.backends.csx.precision.optimization_level == 1


def test_an_unknown_flag_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        cstorch.backends.csx.precision.optimisation_level = 2  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        cstorch.backends.csx.precison = None  # type: ignore[attr-defined]


def test_reset_gives_the_defaults() -> None:
    cstorch.backends.csx.precision.optimization_level = 2
    cstorch.backends.reset()
    assert cstorch.backends.csx.precision.optimization_level == 1


def test_the_kernel_library_is_one_of_two() -> None:
    performance = cstorch.backends.csx.performance
    assert performance.kernel_library == "aten"
    performance.kernel_library = "inductor"
    with pytest.raises(ConfigurationError, match="one of 'aten', 'inductor', not 'fast'"):
        performance.kernel_library = "fast"
    assert performance.kernel_library == "inductor"
    cstorch.backends.reset()
    assert cstorch.backends.csx.performance.kernel_library == "aten"


def test_the_compile_says_nothing_of_precision_unless_it_is_mixed(cluster: FakeCluster, tmp_path: Path) -> None:
    cstorch.amp.set_half_dtype("bfloat16")
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), setup.step)
    (options,) = cluster.options
    assert not options.HasField("precision")


def test_the_compile_says_what_precision_is_wanted(cluster: FakeCluster, tmp_path: Path) -> None:
    cstorch.amp.set_half_dtype("cbfloat16")
    assert cstorch.amp.enable_mixed_precision() is True
    cstorch.backends.csx.precision.optimization_level = 2
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), setup.step)
    wanted = plan_pb2.Precision(half=plan_pb2.HALF_TYPE_CBFLOAT16, optimization_level=2)
    (options,) = cluster.options
    assert options.precision == wanted


def test_gradients_travel_in_half_where_the_script_asks_for_it(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cstorch.amp.set_half_dtype("bfloat16")
    cstorch.amp.enable_mixed_precision()
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), setup.step)
    cstorch.backends.csx.precision.half_gradients = True
    run(setup.executor(1), setup.step)
    assert [options.precision.half_gradients for options in cluster.options] == [False, True]
    said = [line for line in caplog.messages if line.startswith("Mixed precision")]
    assert ["gradients travel in it" in line for line in said] == [False, True]


def test_without_mixed_precision_there_is_no_half_for_gradients(cluster: FakeCluster, tmp_path: Path) -> None:
    cstorch.backends.csx.precision.half_gradients = True
    setup = Setup(cluster, tmp_path)
    with pytest.raises(ConfigurationError, match=r"half_gradients: .* call cstorch.amp.enable_mixed_precision\(\)"):
        run(setup.executor(1), setup.step)
    assert not cluster.options


def test_the_compile_says_what_wafers_may_hold_where_the_script_does(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), setup.step)
    cstorch.backends.csx.debug.wafer_memory_gi = 3
    run(setup.executor(1), setup.step)
    assert [options.wafer_memory_bytes for options in cluster.options] == [0, 3 << 30]


def test_the_precision_of_a_loop_does_not_change_in_it(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)

    def body(batch: torch.Tensor) -> None:
        with pytest.raises(UsageError, match="before the loop"):
            cstorch.amp.enable_mixed_precision()
        with pytest.raises(UsageError, match="before the loop"):
            cstorch.amp.set_half_dtype("bfloat16")
        with pytest.raises(UsageError, match="before the loop"):
            cstorch.backends.csx.precision.optimization_level = 2
        setup.step(batch)

    run(setup.executor(1), body)
    (options,) = cluster.options
    assert not options.HasField("precision")


# --- The CPU backend --------------------------------------------------------------------------------------------------


class Pictures(nn.Module):
    """A small model with layers that autocast computes in the half type, and some that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, 3)
        self.norm = nn.LayerNorm(12)
        self.linear = nn.Linear(12, 4)
        self.has_autocast: list[bool] = []

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.has_autocast.append(torch.is_autocast_enabled("cpu"))
        features = self.convolution(images).relu().flatten(1)
        return nn.functional.cross_entropy(self.linear(self.norm(features)), labels)


def picture_batches(dtype: torch.dtype) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(12, 1, 4, 4, generator=generator).to(dtype)
    return DataLoader(TensorDataset(images, torch.arange(12) % 4), batch_size=4)


def picture_model() -> tuple[Pictures, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Pictures()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_losses(half: torch.dtype, is_mixed: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The losses and the weights of plain PyTorch: the forward pass in autocast, the backward pass outside of it."""
    model, optimizer = picture_model()
    losses = []
    for images, labels in picture_batches(half if is_mixed else torch.float32):
        with torch.autocast("cpu", half, enabled=is_mixed):
            loss = model(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model.state_dict()


Make = Callable[..., object]
BACKENDS = [cstorch.backend, cerebras_pytorch.backend, cerebras_pytorch.experimental.backend]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda make: make.__module__)
@pytest.mark.parametrize("is_mixed", [True, False])
@pytest.mark.parametrize("half", ["bfloat16", "float16", "cbfloat16"])
def test_mixed_precision_on_the_cpu_is_that_of_plain_pytorch(
    tmp_path: Path, backend: Make, is_mixed: bool, half: Any
) -> None:
    dtype = cstorch.amp.set_half_dtype(half)
    losses, weights = plain_losses(dtype, is_mixed)
    backend("CPU", artifact_dir=tmp_path, mixed_precision=is_mixed)
    model, optimizer = picture_model()
    compiled = cstorch.compile(model)
    is_autocast_in_backward: list[bool] = []
    model.linear.weight.register_hook(lambda _: is_autocast_in_backward.append(torch.is_autocast_enabled("cpu")))
    found = []

    @cstorch.trace
    def training_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = compiled(images, labels)
        assert not torch.is_autocast_enabled("cpu")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    loader = cstorch.utils.data.DataLoader(picture_batches, dtype if is_mixed else torch.float32)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=3):
        found.append(training_step(*batch).detach())
    assert all(torch.equal(own, other) for own, other in zip(found, losses, strict=True))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.has_autocast == [is_mixed] * 3
    assert is_autocast_in_backward == [False] * 3


def test_a_compiled_model_computes_in_half_outside_of_a_loop_too(tmp_path: Path) -> None:
    cstorch.amp.set_half_dtype("bfloat16")
    cstorch.backend("CPU", artifact_dir=tmp_path, mixed_precision=True)
    model = nn.Linear(2, 2)
    assert cstorch.compile(model)(torch.ones(1, 2)).dtype is torch.bfloat16
    assert model(torch.ones(1, 2)).dtype is torch.float32


def test_without_the_argument_the_cpu_casts_nothing(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)
    cstorch.amp.enable_mixed_precision()
    model = cstorch.compile(nn.Linear(2, 2))
    assert model(torch.ones(1, 2)).dtype is torch.float32
    with cstorch.amp.autocast():
        assert model(torch.ones(1, 2)).dtype is torch.float16
