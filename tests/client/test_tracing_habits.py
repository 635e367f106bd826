"""What people do around a model, each traced for some steps and compared with plain PyTorch."""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from traced_steps import Runner, states_of, trace

from cstorch._internal.tracing import device_scope
from cstorch.errors import TraceError

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
Make = Callable[[], nn.Module]
Forward = Callable[[Any, torch.Tensor], torch.Tensor]
Tensors = list[torch.Tensor]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def called(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def nothing(model: nn.Module) -> None:
    pass


def check(
    make: Make, forward: Forward = called, after: Callable[[nn.Module], object] = nothing, steps: int = 3
) -> None:
    """Three steps of gradient descent on the device and beside it: losses and states are the same."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    def step_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = forward(model, x).square().mean()
            loss.backward()
            after(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
                        parameter.grad = None
            return loss

        return step

    with device_scope():
        model = made()
    reference = made()
    x = X.to(next(reference.parameters()).dtype)
    runner, step = Runner(trace(step_of(model), x, states_of(model=model), model)), step_of(reference)
    for _ in range(steps):
        (loss,) = runner.step(x)
        torch.testing.assert_close(loss, step(x).detach())
    expected = {f"state.model.{name}": value for name, value in reference.state_dict().items()}
    for name, value in runner.state.items():
        torch.testing.assert_close(value, expected[name], msg=partial("{}: {}".format, name))


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric() -> nn.Linear:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def hooked() -> nn.Sequential:
    def halved(module: nn.Module, given: Any, gradients: Any) -> tuple[torch.Tensor]:
        return (given[0] * 0.5,)

    model = layers()
    weight = model[0].get_parameter("weight")
    weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]  # torch has no types of it
    model[1].register_forward_hook(lambda module, inputs, output: output * 2)
    model[2].register_full_backward_hook(halved)
    return model


def tied() -> nn.Sequential:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last)


def in_double() -> nn.Sequential:
    torch.set_default_dtype(torch.float64)
    try:
        return layers()
    finally:
        torch.set_default_dtype(torch.float32)


def with_other_data() -> nn.Sequential:
    model = layers()
    for parameter in model.parameters():
        parameter.data = torch.full(parameter.shape, 0.1, dtype=torch.float64)
    return model


def empty_then_filled() -> nn.Sequential:
    model = layers().to_empty(device=torch.get_default_device())
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    return model


def compiled() -> nn.Module:
    model = torch.compile(layers())
    assert isinstance(model, nn.Module)
    return model


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 3), "weight", 5)  # type: ignore[no-untyped-call]  # torch has no types of it


MODELS: dict[str, Make] = {
    "double": lambda: layers().double(),
    "double and back": lambda: layers().double().float(),
    "to a type": lambda: layers().to(torch.float64),
    "bfloat16": lambda: layers().bfloat16(),
    "half": lambda: layers().half(),
    "default type": in_double,
    "other data": with_other_data,
    "to_empty": empty_then_filled,
    "deepcopy": lambda: copy.deepcopy(layers()),
    "recurrent in double": lambda: Recurrent().double(),
    "compiled": compiled,
    "parallel": lambda: nn.DataParallel(layers()),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 3)),
    "parametrized": symmetric,
    "pruned": pruned,
    "hooks": hooked,
    "tied": tied,
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_models(make: Make) -> None:
    check(make)


def test_a_compiled_model_warns_of_hooks_of_the_script_alone() -> None:
    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result: torch.Tensor = model(x)
        found.append(any("global hooks" in str(warning.message) for warning in caught))
        return result

    found: list[bool] = []
    with device_scope():
        model = compiled()
    trace(lambda x: call(model, x), X, states_of(model=model), model)
    handle = register_module_forward_hook(lambda module, given, output: None)
    trace(lambda x: call(model, x), X, states_of(model=model), model)
    handle.remove()
    assert found == [False, True]


@torch.compile
def compiled_tanh(x: torch.Tensor) -> torch.Tensor:
    return x.tanh() * 2


def partly_without_gradients(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden = model[0](x)
    return model[2](model[1](hidden))


def under_autocast(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(x)


def by_own_function(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return Clipped.apply(model(x))  # type: ignore[no-untyped-call]  # torch has no types of it


def in_checkpointed_parts(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(model, 2, x, use_reentrant=False)  # type: ignore[no-untyped-call]  # likewise


def saved_on_the_cpu(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=False):
        return model(x)


def saved_in_a_half(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        rounded = tensor.detach().bfloat16()
        rounded[rounded > 0.5] = 0.5
        kept.append(rounded)
        return len(kept) - 1

    def unpack(place: int) -> torch.Tensor:
        restored = kept[place].float()
        restored[restored < -0.5] = -0.5
        return restored

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return model(x)


FORWARDS: dict[str, Forward] = {
    "saved on the CPU": saved_on_the_cpu,
    "saved in another form": saved_in_a_half,
    "compiled function": lambda model, x: compiled_tanh(model(x)),
    "compiled in the step": lambda model, x: torch.compile(model)(x),
    "functional call": lambda model, x: torch.func.functional_call(
        model, {name: value * 2 for name, value in model.named_parameters()}, x
    ),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": lambda model, x: model[2](checkpoint(model[1], model[0](x), use_reentrant=True)),
    "sequential checkpoint": in_checkpointed_parts,
    "own function": by_own_function,
    "gradient of a gradient": lambda model, x: torch.autograd.grad(
        model(x).square().sum(), model[0].weight, create_graph=True
    )[0],
    "vmap": lambda model, x: torch.vmap(model)(x),
    "functional gradient": lambda model, x: torch.func.grad(lambda y: model(y).sum())(x) + model(x).sum(),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,))[1],
    "no_grad": partly_without_gradients,
    "autocast": under_autocast,
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS.keys())
def test_forwards(forward: Forward) -> None:
    check(layers, forward)


def gradients(model: nn.Module) -> Tensors:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


AFTERS: dict[str, Callable[[nn.Module], object]] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=True),
    "total norm": lambda model: [
        gradient.div_(nn.utils.get_total_norm(gradients(model), foreach=True) + 1) for gradient in gradients(model)
    ],
    "clip with a norm": lambda model: nn.utils.clip_grads_with_norm_(
        model.parameters(), 0.1, nn.utils.get_total_norm(gradients(model)), foreach=True
    ),
    "vector": lambda model: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters()
    ),
}


@pytest.mark.parametrize("after", AFTERS.values(), ids=AFTERS.keys())
def test_what_is_done_with_gradients(after: Callable[[nn.Module], object]) -> None:
    check(layers, after=after)


def in_place(a: Tensors, b: Tensors) -> Tensors:
    torch._foreach_mul_(a, 0.5)
    torch._foreach_addcdiv_(a, b, b, [1.0, 2.0])
    torch._foreach_lerp_(a, b, 0.3)
    torch._foreach_copy_(b, a)
    torch._foreach_zero_(b[1:])
    return [*a, *b]


LISTS: dict[str, Callable[[Tensors, Tensors], Sequence[torch.Tensor]]] = {
    "add": lambda a, b: torch._foreach_add(a, b, alpha=2),
    "mul": lambda a, b: torch._foreach_mul(a, [2.0, 3.0]),
    "div": lambda a, b: torch._foreach_div(a, b),
    "sub number": lambda a, b: torch._foreach_sub(a, 1.5),
    "addcdiv": lambda a, b: torch._foreach_addcdiv(a, b, b, value=0.5),
    "addcmul": lambda a, b: torch._foreach_addcmul(a, b, b, [0.5, 2.0]),
    "lerp": lambda a, b: torch._foreach_lerp(a, b, 0.3),
    "lerp list": lambda a, b: torch._foreach_lerp(a, b, b),
    "maximum": lambda a, b: torch._foreach_maximum(a, b),
    "maximum number": lambda a, b: torch._foreach_maximum(a, 0.2),
    "minimum number": lambda a, b: torch._foreach_minimum(a, 0.2),
    "clamp": lambda a, b: torch._foreach_clamp_max(torch._foreach_clamp_min(a, 0.1), b),
    "norm": lambda a, b: torch._foreach_norm(a, 1),
    "max": lambda a, b: torch._foreach_max(a),
    "sqrt": lambda a, b: torch._foreach_sqrt(torch._foreach_abs(torch._foreach_neg(a))),
    "pow": lambda a, b: torch._foreach_pow(torch._foreach_abs(a), 1.5),
    "reciprocal": lambda a, b: torch._foreach_reciprocal(b),
    "in place": in_place,
}


@pytest.mark.parametrize("function", LISTS.values(), ids=LISTS.keys())
def test_lists_of_tensors(function: Callable[[Tensors, Tensors], Sequence[torch.Tensor]]) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = [x + 1, x[0] * 2], [x * 3, x[1] + 0.5]
        return tuple(tensor * 1 for tensor in function(first, second))

    with torch.no_grad():
        results = Runner(trace(step, X)).step(X)
        torch.testing.assert_close(results, list(step(X)))


def test_a_tensor_takes_over_the_storage_of_another() -> None:
    with device_scope():
        tensor, other = torch.zeros(2, 3), torch.arange(6.0).view(3, 2).t()
    tensor.set_(other)  # type: ignore[call-overload]  # the stubs know of storages alone
    other.add_(1)
    assert tensor.tolist() == [[1, 3, 5], [2, 4, 6]]


def test_sizes_do_not_change_in_place() -> None:
    with device_scope():
        tensor = torch.zeros(2, 3)
    assert tensor.resize_(2, 3) is tensor
    with pytest.raises(TraceError, match="keep their sizes"):
        tensor.resize_(4, 3)


def test_types_do_not_change_in_a_step() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        model.double()
        return model(x)

    with device_scope():
        model = nn.Linear(4, 3)
    with pytest.raises(TraceError, match=r"test_tracing_habits.py:\d+ .*before the loop"):
        trace(step, X, states_of(model=model), model)
