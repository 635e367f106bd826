"""What people do around a model, each traced for some steps and compared with plain PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from traced_steps import Runner, states_of, trace

from cstorch._internal.tracing import device_scope
from cstorch.errors import TraceError

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def layers():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def called(model, x):
    return model(x)


def nothing(model):
    pass


def check(make, forward=called, after=nothing, steps=3):
    """Three steps of gradient descent on the device and beside it: losses and states are the same."""

    def made():
        torch.manual_seed(0)
        return make()

    def step_of(model):
        def step(x):
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
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def symmetric():
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def hooked():
    model = layers()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    model[1].register_forward_hook(lambda module, inputs, output: output * 2)
    model[2].register_full_backward_hook(lambda module, given, gradients: (given[0] * 0.5,))
    return model


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def in_double():
    torch.set_default_dtype(torch.float64)
    try:
        return layers()
    finally:
        torch.set_default_dtype(torch.float32)


def with_other_data():
    model = layers()
    for parameter in model.parameters():
        parameter.data = torch.full(parameter.shape, 0.1, dtype=torch.float64)
    return model


def empty_then_filled():
    model = layers().to_empty(device=torch.get_default_device())
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    return model


MODELS = {
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
    "compiled": lambda: torch.compile(layers()),
    "parallel": lambda: nn.DataParallel(layers()),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 3)),
    "parametrized": symmetric,
    "pruned": lambda: prune.l1_unstructured(nn.Linear(4, 3), "weight", 5),
    "hooks": hooked,
    "tied": tied,
}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x):
        return self.lstm(x)[0]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_models(make):
    check(make)


@torch.compile
def compiled_tanh(x):
    return x.tanh() * 2


def partly_without_gradients(model, x):
    with torch.no_grad():
        hidden = model[0](x)
    return model[2](model[1](hidden))


def under_autocast(model, x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(x)


FORWARDS = {
    "compiled function": lambda model, x: compiled_tanh(model(x)),
    "compiled in the step": lambda model, x: torch.compile(model)(x),
    "functional call": lambda model, x: torch.func.functional_call(
        model, {name: value * 2 for name, value in model.named_parameters()}, x
    ),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": lambda model, x: model[2](checkpoint(model[1], model[0](x), use_reentrant=True)),
    "sequential checkpoint": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False),
    "own function": lambda model, x: Clipped.apply(model(x)),
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
def test_forwards(forward):
    check(layers, forward)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


AFTERS = {
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
def test_what_is_done_with_gradients(after):
    check(layers, after=after)


LISTS = {
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
    "in place": lambda a, b: (
        [
            torch._foreach_mul_(a, 0.5),
            torch._foreach_addcdiv_(a, b, b, [1.0, 2.0]),
            torch._foreach_lerp_(a, b, 0.3),
            torch._foreach_copy_(b, a),
            torch._foreach_zero_(b[1:]),
        ][:0]
        or [*a, *b]
    ),
}


@pytest.mark.parametrize("function", LISTS.values(), ids=LISTS.keys())
def test_lists_of_tensors(function):
    def step(x):
        first, second = [x + 1, x[0] * 2], [x * 3, x[1] + 0.5]
        return tuple(tensor * 1 for tensor in function(first, second))

    with torch.no_grad():
        results = Runner(trace(step, X)).step(X)
        torch.testing.assert_close(results, list(step(X)))


def test_a_tensor_takes_over_the_storage_of_another():
    with device_scope():
        tensor, other = torch.zeros(2, 3), torch.arange(6.0).view(3, 2).t()
    tensor.set_(other)
    other.add_(1)
    assert tensor.tolist() == [[1, 3, 5], [2, 4, 6]]


def test_sizes_do_not_change_in_place():
    with device_scope():
        tensor = torch.zeros(2, 3)
    assert tensor.resize_(2, 3) is tensor
    with pytest.raises(TraceError, match="keep their sizes"):
        tensor.resize_(4, 3)


def test_types_do_not_change_in_a_step():
    def step(x):
        model.double()
        return model(x)

    with device_scope():
        model = nn.Linear(4, 3)
    with pytest.raises(TraceError, match=r"test_tracing_habits.py:\d+ .*before the loop"):
        trace(step, X, states_of(model=model), model)
