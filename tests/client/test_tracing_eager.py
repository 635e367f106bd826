"""Device tensors outside a traced step: cells, moving, initialisation, copying."""

import copy
import errno
import gc
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from cstorch._internal.tracing import DEVICE, Cell, LazyTensor, cell_of, device_scope, from_cpu, move_module, new_tensor
from cstorch._internal.tracing.cell import RAM_BYTES

LARGE = RAM_BYTES // 4 + 100


def linear() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    reference = copy.deepcopy(model)
    move_module(model)
    return model, reference


def test_moving_keeps_parameters_and_ties() -> None:
    first, second, norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
    model = nn.Sequential(first, second, norm)
    second.weight = first.weight
    weight = first.weight
    value = weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    move_module(model)
    assert first.weight is weight is second.weight is optimizer.param_groups[0]["params"][0]
    assert isinstance(weight, nn.Parameter)
    assert weight.device.type == "lazy"
    assert isinstance(norm.running_mean, LazyTensor)
    assert torch.equal(weight.cpu(), value)
    move_module(model)
    assert first.weight is weight


def test_moving_modules_that_hold_weak_references() -> None:
    model = nn.LSTM(4, 3)
    move_module(model)
    assert all(isinstance(parameter, LazyTensor) for parameter in model.parameters())


def test_to_and_cpu() -> None:
    model, reference = linear()
    assert torch.equal(reference.weight.to("lazy").cpu(), reference.weight)
    assert torch.equal(reference.weight.to(torch.device("lazy", 0)).cpu(), reference.weight)
    model.cpu()
    assert type(model.weight.data) is torch.Tensor
    assert torch.equal(model.weight, reference.weight)


@pytest.mark.parametrize("shape", [(3, 5), (LARGE,), (LARGE, 3)])
def test_initialisation_is_bitwise_that_of_the_cpu(shape: tuple[int, ...]) -> None:
    def make() -> list[torch.Tensor]:
        torch.manual_seed(3)
        values = [torch.zeros(shape), torch.ones(shape), torch.randn(shape), torch.arange(7), torch.tensor([1.5, 2])]
        values.append(nn.init.kaiming_uniform_(torch.empty(shape)) if len(shape) > 1 else torch.rand(shape))
        values.append(nn.Linear(9, 11).weight.detach())
        return values

    expected = make()
    with device_scope() as device:
        values = make()
        assert device == DEVICE
    for value, reference in zip(values, expected, strict=True):
        assert isinstance(value, LazyTensor)
        assert torch.equal(value.cpu(), reference)
        assert value.dtype == reference.dtype


def test_changes_between_steps() -> None:
    model, reference = linear()
    cell = cell_of(model.weight)
    version = cell.version
    model.weight.data.mul_(0.9)
    assert cell.version == version + 1
    model.bias.data = torch.ones(3)
    with torch.no_grad():
        model.weight[0].zero_()
        model.weight.t()[1].add_(1)
    expected = reference.weight.detach() * 0.9
    expected[0] = 0
    expected.t()[1] += 1
    assert torch.equal(model.weight.cpu(), expected)
    assert torch.equal(model.bias.cpu(), torch.ones(3))
    assert cell.version == version + 3


def test_reading_does_not_count_as_a_change() -> None:
    model, _ = linear()
    version = cell_of(model.weight).version
    model.weight.norm().item()
    str(model.weight)
    assert (model.weight + 1).tolist()
    assert f"{model.weight.sum():.2f}"
    assert cell_of(model.weight).version == version


def test_large_tensors_alias_through_the_spool() -> None:
    tensor = from_cpu(torch.arange(float(LARGE)))
    view = tensor[10:20]
    view.add_(tensor[:10])  # both sides of one operation over one mapping
    expected = torch.arange(float(LARGE))
    expected[10:20] += expected[:10]
    assert torch.equal(tensor.cpu(), expected)
    tensor.t_() if tensor.dim() > 1 else tensor.unsqueeze_(0)
    assert tensor.shape == (1, LARGE)
    assert torch.equal(tensor.cpu(), expected[None])


def test_eager_gradients() -> None:
    model, reference = linear()
    x = torch.randn(2, 4)
    model(x.to(DEVICE)).sum().backward()
    reference(x).sum().backward()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad.cpu(), reference.weight.grad)


def test_state_dict_deepcopy_pickle_and_save() -> None:
    model, reference = linear()
    weight = model.weight
    model.load_state_dict({name: torch.ones_like(value) for name, value in reference.state_dict().items()})
    assert model.weight is weight
    assert torch.equal(weight.cpu(), torch.ones(3, 4))
    model.load_state_dict(reference.state_dict())
    copied = copy.deepcopy(model)
    copied.weight.data.zero_()
    assert isinstance(copied.weight, nn.Parameter)
    assert torch.equal(model.weight.cpu(), reference.weight)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert type(loaded["weight"]) is torch.Tensor
    assert torch.equal(loaded["weight"], reference.weight)
    assert type(pickle.loads(pickle.dumps(model)).weight) is nn.Parameter  # noqa: S301


@pytest.mark.parametrize("count", [8, LARGE])
def test_remote_values_are_fetched_once_and_only_when_read(count: int) -> None:
    cell = Cell((count,), torch.float32)
    tensor = new_tensor(cell)
    fetched = []

    def fetch() -> Iterator[torch.Tensor]:
        fetched.append(1)
        yield torch.full((count - 1,), 5.0)  # in pieces
        yield torch.full((1,), 5.0)

    cell.write(torch.ones(count))
    version = cell.version
    cell.set_remote(fetch)
    tensor.detach()[2:].view(-1)
    nn.Parameter(tensor)
    assert cell.remote
    assert not fetched
    assert tensor.sum().item() == 5 * count
    assert tensor.sum().item() == 5 * count
    assert fetched == [1]
    assert not cell.remote
    assert cell.version == version
    cell.set_remote(fetch)
    tensor.add_(1)
    assert fetched == [1, 1]
    assert cell.read()[0] == 6
    assert cell.version == version + 1
    cell.set_remote(fetch)
    tensor.copy_(torch.zeros(count))  # overwrites all of it: nothing to fetch
    assert fetched == [1, 1]
    assert cell.version == version + 2


def test_a_partial_write_fetches_first() -> None:
    cell = Cell((4,), torch.float32)
    cell.set_remote(lambda: iter([torch.full((4,), 5.0)]))
    new_tensor(cell)[:2].zero_()
    assert cell.read().tolist() == [0, 0, 5, 5]


def test_a_cell_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="shape"):
        Cell((4,), torch.float32).write(torch.zeros(5))
    with pytest.raises(ValueError, match="float64"):
        Cell((4,), torch.float32).write(torch.zeros(4, dtype=torch.float64))


def test_a_full_temporary_folder_is_named_before_a_large_tensor_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to memory that is mapped from a full disk would end the process."""

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"cannot take a tensor of .* MB: No space left on device .*TMPDIR") as error:
        from_cpu(torch.ones(LARGE))
    assert error.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert from_cpu(torch.ones(LARGE)).sum().item() == LARGE


@pytest.mark.cluster
def test_spooled_tensors_leave_memory_and_nothing_on_disk(tmp_path: Path) -> None:
    script = """
import os, resource, sys, torch
from torch import nn
from cstorch._internal.tracing import device_scope, cell_of
from cstorch import backends
backends.csx.debug.lazy_initialization = False
with device_scope():
    torch.zeros_like(torch.ones(1 << 16)) + 1  # torch imports much at the first operations on a tensor subclass
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensors = [torch.zeros(4 << 20).cos_() for _ in range(16)]  # 16 x 16 MiB
    state = [torch.zeros_like(t) for t in tensors]              # costs nothing
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
assert grown < 100 << 10, grown
assert tensors[3].sum().item() == 4 << 20 and state[3].sum().item() == 0
assert not os.listdir(os.environ["TMPDIR"])
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=60)
    assert not os.listdir(tmp_path)


def test_dropped_cells_give_their_room_back() -> None:
    from cstorch._internal.tracing.cell import spool

    tensor = from_cpu(torch.ones(1 << 20))
    os.fsync(spool()._file.fileno())
    used = os.fstat(spool()._file.fileno()).st_blocks
    del tensor
    gc.collect()
    assert os.fstat(spool()._file.fileno()).st_blocks <= used - (3 << 20) // 512


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.arange(5, device=device),
        lambda device: torch.arange(2, 6, device=device),
        lambda device: torch.arange(0.0, 1.0, 0.25, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.eye(2, 3, device=device),
        lambda device: torch.randperm(6, device=device),
        lambda device: torch.linspace(0, 1, 4, device=device),
    ],
)
def test_factories_that_resize_what_they_fill(make: Callable[[str], torch.Tensor]) -> None:
    torch.manual_seed(0)
    expected = make("cpu")
    torch.manual_seed(0)
    made = make("lazy")
    assert made.shape == expected.shape
    assert torch.equal(made.cpu(), expected)
