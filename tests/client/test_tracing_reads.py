"""Reading a value in a traced step is refused, whatever way it is read; legal tensor forms are not."""

import math
import pickle
import sysconfig
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from traced_steps import Getter, Step, states_of, trace

from cstorch._internal.tracing import DEVICE, device_scope, is_tracing, move_module
from cstorch._internal.tracing.recording import known_values
from cstorch.errors import TraceError

X = torch.randn(2, 4)
Read = Callable[[torch.Tensor], object]


def model_and_step(function: Read) -> tuple[dict[str, Getter], Step]:
    model = nn.Linear(4, 3)
    move_module(model)
    return states_of(model=model), lambda x: function(model(x))


READS: dict[str, Read] = {
    "item": lambda t: t.sum().item(),
    "if": lambda t: bool(t.sum() > 0),
    "assert": lambda t: (_ for _ in ()).throw(AssertionError) if t.sum() == 0 else 0,
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "index": lambda t: range(t.argmax()),
    "list repeat": lambda t: [0] * t.argmax(),
    "print": print,
    "f-string": lambda t: f"{t.sum():.3f}",
    "f-string without format": lambda t: f"{t.sum()}",
    "to cpu": lambda t: t.to("cpu"),
    "cpu": lambda t: t.cpu(),
    "numpy": lambda t: t.detach().numpy(),
    "asarray": lambda t: np.asarray(t.detach()),
    "tolist": lambda t: t.tolist(),
    "mask": lambda t: t[t > 0],
    "masked_select": lambda t: t.masked_select(t > 0),
    "nonzero": lambda t: t.nonzero(),
    "unique": lambda t: t.unique(),
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "copy to cpu": lambda t: torch.zeros(2, 3).copy_(t.detach()),
    "pickle": lambda t: pickle.dumps(t.detach()),
    "data_ptr": lambda t: t.data_ptr(),
    "in": lambda t: t.sum() in [1.0, 2.0],
    "math.sqrt": lambda t: math.sqrt(t.sum()),
    "max": lambda t: max(t.sum(), t.sum()),
    "repeat_interleave": lambda t: torch.repeat_interleave(t.detach(), t.detach().sum(0).long().abs()[:2], dim=0),
    "one_hot": lambda t: F.one_hot(t.argmax(-1)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_value_reads_are_refused(read: Read) -> None:
    states, step = model_and_step(read)
    with pytest.raises(RuntimeError):
        trace(step, X, states)
    assert not is_tracing()


def test_a_text_without_its_value_is_refused_with_another_way_out() -> None:
    states, step = model_and_step(lambda t: f"{t.sum():.3f}")
    with pytest.raises(TraceError, match=r"test_tracing_reads.py:\d+ a print, an f-string or str\(\) needs the value"):
        trace(step, X, states)


def test_the_message_has_the_seed_text_the_line_and_the_way_out() -> None:
    states, step = model_and_step(lambda t: t.sum().item())
    with pytest.raises(TraceError) as error:
        trace(step, X, states)
    text = str(error.value)
    seed = "The Cerebras backend does not yet support `aten::_local_scalar_dense(Tensor self) -> Scalar`"
    assert text.splitlines()[1] == seed  # behind what helps
    assert "test_tracing_reads.py:" in text
    assert "step_closure" in text


SHAPES: dict[str, Read] = {
    "nonzero": lambda t: t.nonzero(),
    "where with one argument": lambda t: torch.where(t > 0),
    "masked_select": lambda t: torch.masked_select(t, t > 0),
    "mask as index": lambda t: t[t > 0],
    "mask of rows": lambda t: t[t.sum(1) > 0],
    "unique": lambda t: torch.unique(t),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes_that_depend_on_values_are_refused(shape: Read) -> None:
    states, step = model_and_step(shape)
    with pytest.raises(TraceError, match=r"(?s)test_tracing_reads.py:\d+ the shape .* depends on.*torch\.where"):
        trace(step, X, states)


def test_a_result_without_a_meta_kernel_is_refused_with_a_way_out() -> None:
    with pytest.raises(TraceError, match=r"aten::geqrf.*test_tracing_reads.py:\d+.*Write it with other"):
        trace(lambda x: torch.geqrf(x)[0], X)


def test_numpy_is_a_type_error() -> None:
    states, step = model_and_step(lambda t: t.detach().numpy())
    with pytest.raises(TypeError):
        trace(step, X, states)


DECAYS: dict[str, Callable[[Any], object]] = {  # Any: the stubs want numbers
    "alpha": lambda t: torch.add(t, t, alpha=t.sum().detach()),
    "value of addcdiv": lambda t: torch.addcdiv(t, t, t, value=t.sum().detach()),
    "value of addcmul_": lambda t: t.detach().addcmul_(t.detach(), t.detach(), value=t.sum().detach()),
    "full": lambda t: torch.full((2,), t.sum().detach(), device=DEVICE),
    "slice": lambda t: t[: t.argmax()],
    "view": lambda t: t.view(t.argmax()),
    "dropout": lambda t: F.dropout(t, t.sum().detach()),
}


@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS.keys())
def test_scalar_decay_has_the_seed_text(decay: Read) -> None:
    states, step = model_and_step(decay)
    with pytest.raises(RuntimeError, match=r"SyncTensor called outside of MarkStep.*test_tracing_reads.py:\d+"):
        trace(step, X, states)


LEGAL: dict[str, Read] = {
    "lerp": lambda t: torch.lerp(t, t, t.sum().detach()),
    "clamp": lambda t: torch.clamp(t, max=t.sum().detach()),
    "fill_": lambda t: t.detach().clone().fill_(t.sum().detach()),
    "_foreach_mul_": lambda t: torch._foreach_mul_([t.detach().clone()], t.sum().detach()),
    "integer index": lambda t: t[torch.zeros(2, dtype=torch.int64, device=t.device)],
    "repr": repr,
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "tensor of tensor": lambda t: t.detach().clone(),
}


@pytest.mark.parametrize("form", LEGAL.values(), ids=LEGAL.keys())
def test_tensor_forms_are_legal(form: Read) -> None:
    states, step = model_and_step(form)
    trace(step, X, states)


def test_cpu_tensors_do_not_mix() -> None:
    with pytest.raises(TraceError, match=r"Expected all tensors to be on the same device.*\.to\("):
        trace(lambda x: x + torch.ones(4), X)


def test_a_value_is_known_that_the_step_does_not_change() -> None:
    with device_scope():
        count, constant = torch.tensor(2), torch.tensor(2)
    states = states_of(count=lambda: count)
    for step in (lambda x: x * count.item(), lambda x: x * int(count + constant), lambda x: x * constant.item()):
        assert trace(step, X, states).outputs


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "after": lambda x, count: (x * count.item(), count.add_(1)),
    "before": lambda x, count: (count.add_(1), x * count.item()),
    "by the batch": lambda x, count: (x if count < 5 else -x, count.add_(x.sum().long())),
    "of a copy": lambda x, count: (x * float(count + 1), count.copy_(count * 2)),
}


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("step", CHANGES.values(), ids=CHANGES.keys())
def test_a_state_that_the_step_changes_cannot_be_read(
    step: Callable[[torch.Tensor, torch.Tensor], object], registered: bool
) -> None:
    with device_scope():
        count = torch.tensor(2)
    states = states_of(count=lambda: count) if registered else {}
    with pytest.raises(TraceError, match=r"(?s)test_tracing_reads.py:\d+ .*depends on the state .*torch\.where"):
        trace(lambda x: step(x, count), X, states)


def test_what_is_made_of_the_batch_is_not_known_whatever_was_known_before() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(2, device=x.device)
        view = total[:1]
        assert view.tolist() == [0]
        total.add_(1)
        assert view.tolist() == [1]
        view.add_(x.sum())
        return x * total[1].item()

    with pytest.raises(TraceError, match="value of a traced tensor is needed"):
        trace(step, X)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["add", "view", "fill", "mask", "copy", "cat", "clone", "row"]), max_size=8))
def test_constants_are_what_torch_makes_of_the_same_operations(operations: list[str]) -> None:
    def make(device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.arange(12, device=device).view(3, 4)
        tensor = base
        for number, operation in enumerate(operations):
            match operation:
                case "add":
                    tensor.add_(number + 1)
                case "view":
                    tensor = tensor.t()
                case "fill":
                    tensor[0].fill_(number)
                case "mask":
                    tensor.masked_fill_(tensor % 3 == 0, number)
                case "copy":
                    tensor[1:].copy_(tensor[:-1].clone())
                case "cat":
                    tensor = torch.cat([tensor, torch.triu(tensor)])
                case "clone":
                    tensor = tensor.clone()
                case "row":
                    base[1] = number
        return base, tensor

    def step(x: torch.Tensor) -> torch.Tensor:
        read.extend(tensor.tolist() for tensor in make(x.device))
        return x

    read: list[object] = []
    trace(step, X)
    assert read == [tensor.tolist() for tensor in make("cpu")]


KNOWN: dict[str, Read] = {
    "equal": lambda t: torch.equal(t, t.clone()),
    "all": lambda t: bool((t == t).all()),
    "in": lambda t: t.sum() in [6, 7],
    "numpy": lambda t: t.numpy().sum(),
    "f-string": lambda t: f"{t.sum():d} {t.sum()}",
    "print": str,
    "nonzero": lambda t: t.nonzero().tolist(),
    "unique": lambda t: t.unique().tolist(),
    "one_hot": lambda t: F.one_hot(t).tolist(),
    "masked_select": lambda t: t.masked_select(t > 1).tolist(),
    "repeat_interleave": lambda t: torch.repeat_interleave(t, t).tolist(),
    "range": lambda t: list(range(t.max())),
    "slice": lambda t: t[: t.argmax()].tolist(),
}


@pytest.mark.parametrize("read", KNOWN.values(), ids=KNOWN.keys())
def test_every_way_of_reading_a_constant(read: Read) -> None:
    read_values = []

    def step(x: torch.Tensor) -> torch.Tensor:
        read_values.append(read(torch.arange(4, device=x.device)))
        return x

    trace(step, X)
    assert read_values == [read(torch.arange(4))]


def test_too_large_a_constant_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_values, "COMPUTED_BYTES", 1000)
    with pytest.raises(TraceError):
        trace(lambda x: x * torch.ones(300, device=x.device).sum().item(), X)


def test_packages_may_write_messages_and_check_values() -> None:
    """As transformers do of the number of image tokens; a script's own text is refused."""
    source = """
def forward(t):
    text = f"{t.sum()} elements"
    torch._check_tensor_all(t == t, text)
    return t * 2
"""
    module: dict[str, Any] = {"torch": torch}
    exec(compile(source, f"{sysconfig.get_paths()['purelib']}/a_package/model.py", "exec"), module)
    states, step = model_and_step(module["forward"])
    trace(step, X, states)
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        torch._check_tensor_all(torch.zeros(1, dtype=torch.bool))  # type: ignore[no-untyped-call]


def test_a_failed_trace_leaves_nothing_behind() -> None:
    model = nn.Linear(4, 3)
    move_module(model)
    value = model.weight.cpu()

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        with torch.no_grad():
            model.weight.mul_(2)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        trace(step, X, states_of(model=model))
    assert not is_tracing()
    assert model.weight.grad is None
    assert torch.equal(model.weight.cpu(), value)
