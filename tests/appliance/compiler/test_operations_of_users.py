"""Operations as scripts write them, on one wafer and on two, against plain torch: what once failed at a wafer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import Traced
from plan_simulator import Simulation
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from appliance.compiler.core.target import Half, Precision
from cstorch.errors import CompileError, TraceError

pytestmark = pytest.mark.parity

X = torch.arange(24.0).reshape(4, 6) / 7 - 1
MASK = torch.tensor([True, False, True, False])
COLUMNS = torch.tensor([True, False, True, False, True, False])
CLUSTERS = [(1, 1), (2, 1)]

Function = Callable[..., Any]


def check(function: Function, *batch: torch.Tensor, model: nn.Module | None = None, **settings: Any) -> None:
    traced = Traced(lambda m: lambda given: function(m, *given), model or nn.Linear(6, 3), list(batch), double=False)
    traced.check([list(batch)], CLUSTERS, rtol=1e-5, **settings)


def assigned(x: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    changed = x.clone()
    changed[key] = value
    return changed


OPERATIONS: dict[str, Function] = {
    "an index from the end": lambda m, x, i: x[:, [-2]],
    "indices from the end": lambda m, x, i: (m.weight[i - 2], x[:, [-1, 0, -6]]),
    "one piece": lambda m, x, i: (x.split(6, 1)[0] * 2, x.chunk(1, 1)[0] * 2, x[:, None].unbind(1)[0] * 2),
    "one piece of sizes": lambda m, x, i: torch.split(x, [6], 1)[0] * 2,
    "rows by a mask": lambda m, x, i: assigned(x, i > 0, 0.0),
    "elements by a mask": lambda m, x, i: assigned(x, x > 1, -1.0),
    "a vector by a mask": lambda m, x, i: assigned(x, i > 0, x.new_ones(6)),
    "columns by a mask": lambda m, x, i: assigned(x, (slice(None), m.weight[0] > 0), 5.0),
    "a mask behind an ellipsis": lambda m, x, i: assigned(x.view(4, 2, 3), (..., m.weight[0, :3] > 0), x[:, :2, None]),
    "columns by a known mask": lambda m, x, i: assigned(x, (slice(None), COLUMNS), x[:, COLUMNS] - 1),
    "columns by a mask on the device": lambda m, x, i: assigned(
        x, (slice(None), torch.arange(6, device=x.device) % 3 > 0), x[:, :4] * 2
    ),
    "known masks of two dimensions": lambda m, x, i: assigned(x.view(4, 2, 3), (slice(None), MASK[:2], MASK[:3]), 0.0),
    "rows put by a known mask": lambda m, x, i: (
        m.weight.index_put((MASK[:3],), m.weight[:2], accumulate=True) + x.sum()
    ),
    "a mask put": lambda m, x, i: (
        x.index_put((i > 0,), x.new_ones(6)),
        x.clone().index_put_((i > 0,), x.new_tensor(1.0), accumulate=True),
    ),
    "a filled mask": lambda m, x, i: x.masked_fill(x > 1, torch.tensor(3.0)),
    "filled columns": lambda m, x, i: x.index_fill(1, i % 3, torch.tensor(3.0)),
    "no elements": lambda m, x, i: (x.repeat(1, 0), x[:, 0].repeat(0), x[:, :0].reshape(4, 0, 3).sum(-1)),
    "losses of a half": lambda m, x, i: tuple(
        loss((x / 2).bfloat16(), target=m(x).repeat(1, 2)) for loss in (F.mse_loss, F.smooth_l1_loss)
    ),
    "shifts": lambda m, x, i: (
        i >> 1,
        -i >> 1,
        i << i,
        i[:, None] >> m.weight[0].long(),
        torch.bitwise_right_shift(i, 1),
        2 << i,
    ),
    "shifts in place": lambda m, x, i: (i.clone().__irshift__(1), i.clone().__ilshift__(i)),
    "a count for each sample": lambda m, x, i: (
        x * x.new_zeros(4).index_add(0, m.bias.new_zeros(9).long() + 2, torch.ones(9, device=x.device)).unsqueeze(1),
        x * x.new_zeros(4).index_add(0, m.bias.new_zeros(8).long() + 1, m.bias.sum() * x.new_ones(8)).unsqueeze(1),
    ),
    "polygamma_": lambda m, x, i: (x + 2).polygamma_(1),
    "integers of 32 bits": lambda m, x, i: F.nll_loss(x.log_softmax(1), i.int() if x.device.type != "cpu" else i),
    "a broadcast index": lambda m, x, i: x[
        torch.arange(4, device=x.device)[:, None, None, None], torch.arange(5, device=x.device)[None, None, None, :] - 2
    ],
    "diagonals": lambda m, x, i: x.view(4, 2, 3).diagonal(1, 1, 2),
    "distances": lambda m, x, i: (torch.cdist(x, m.weight), torch.cdist(x, m.weight, 1)),
    "masked_scatter": lambda m, x, i: m.weight.masked_scatter(m.weight > 0, m.weight * 2) + x.sum(),
    "windows": lambda m, x, i: x.unfold(1, 3, 2),
    "activations": lambda m, x, i: (F.glu(x), F.celu(x), F.prelu(x, m.weight[0, :1])),
    "statistics": lambda m, x, i: (torch.std_mean(x, 1), x.median(1).values, x.sqrt().nansum(1)),
    "pairs": lambda m, x, i: (torch.logaddexp(x, x * 2), torch.fmax(x, x.sqrt()), torch.fmin(x, -x)),
    "places": lambda m, x, i: (
        torch.bucketize(x, m.weight[0].sort().values),
        torch.searchsorted(m.weight[0].sort().values, x),
        torch.isin(i, i.new_tensor([1, 2])),
    ),
    "matrices": lambda m, x, i: (torch.diag_embed(x), m.weight.trace() + x.sum(), x.view(4, 2, 3).rot90(1, (1, 2))),
    "extrema at places": lambda m, x, i: x.scatter_reduce(1, (x > 0).long(), x, "amax"),
    "ranges": lambda m, x, i: x + torch.linspace(0, 1, 6, device=x.device),
    "small formulas": lambda m, x, i: (torch.rad2deg(x), torch.sinc(x), torch.dist(x, x * 2), torch.hypot(x, x + 1)),
    "copies of views": lambda m, x, i: (
        torch.permute_copy(x.view(4, 2, 3), (0, 2, 1)),
        torch.unsafe_split(x, 2, 1)[1],
        torch.split_with_sizes_copy(x, [2, 4], 1)[1],  # type: ignore[func-returns-value, index]  # no result in the stubs
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name: str) -> None:
    check(OPERATIONS[name], X, torch.arange(4))


def gradients(function: Function) -> Function:
    """The gradients of the weights, for a loss in which every element has another weight."""

    def step(m: Any, x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        made = function(m, x, i)
        weights = torch.linspace(0.5, 2, made.numel(), device=x.device).reshape(made.shape)
        return list(torch.autograd.grad((made * weights).sum(), list(m.parameters()), allow_unused=False))

    return step


def chosen(pred: torch.Tensor, *branches_and_operands: Any) -> Any:
    """torch.cond, which plain torch would compile."""
    if pred.device.type != "cpu":
        return torch.cond(pred, *branches_and_operands)
    return branches_and_operands[0 if pred else 1](*branches_and_operands[2])


DIFFERENTIABLE: dict[str, Function] = {
    "a branch": lambda m, x, i: chosen(x.sum() > 0, lambda y: y.pow(2), lambda y: y.abs() + m.bias, (m(x),)),
    "the other branch": lambda m, x, i: chosen(x.sum() < 0, lambda y: y.pow(2), lambda y: y.abs() + m.bias, (m(x),)),
    "a branch without operands": lambda m, x, i: chosen(m.bias.sum() < 9, lambda: m(x), lambda: -m(x), ()),
    "a mask that chooses": lambda m, x, i: assigned(m(x), x[:, :3] > 0, m.bias.sum()),
    "distances": lambda m, x, i: torch.cdist(x + m.bias.sum(), m.weight, 3),
    "windows": lambda m, x, i: m(x).unfold(1, 2, 1),
    "a diagonal": lambda m, x, i: (m(x)[:, :, None] * m.weight.sum(1)).diagonal(0, 1, 2),
    "indices from the end": lambda m, x, i: m(x)[:, [-1, -3]] * m.weight[i - 2, :2],
    "gated": lambda m, x, i: F.glu(m(x).repeat(1, 2)),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient(name: str) -> None:
    check(gradients(DIFFERENTIABLE[name]), X, torch.arange(4))


class Saturated(torch.autograd.Function):
    """The sign, with the gradient of the identity between -1 and 1, by masked writes in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        changed = gradient.clone()
        changed[x.ge(1)] = 0
        return changed.index_put((x.le(-1),), changed.new_zeros(()))


class Cube(torch.autograd.Function):
    """The third power, with half of its gradient; a transform makes its rule for batches."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 1.5 * x**2 * gradient


class Doubled(torch.autograd.Function):
    """Twice the value, with a rule for batches of its own."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return Doubled.apply(x), in_dims[0]  # type: ignore[no-untyped-call]


def clipped(x: torch.Tensor) -> torch.Tensor:
    return assigned(x, x < -0.5, -0.5)


def hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: assigned(gradient, gradient > 1, 1.0))
    return x * 1


RUN_IN_BACKWARD: dict[str, Function] = {
    "a function with its own gradient": lambda m, x, i: Saturated.apply(m(x)),  # type: ignore[no-untyped-call]  # torch has no types of it
    "such a function in vmap": lambda m, x, i: torch.vmap(lambda row: Cube.apply(m(row)))(x),  # type: ignore[no-untyped-call]
    "one with its own rule in vmap": lambda m, x, i: torch.vmap(lambda row: Doubled.apply(m(row)))(x),  # type: ignore[no-untyped-call]
    "such a function in grad": lambda m, x, i: torch.func.grad(lambda y: Cube.apply(y).sum())(m(x)),  # type: ignore[no-untyped-call]
    "a hook of a tensor": lambda m, x, i: hooked(m(x)),
    "computed again": lambda m, x, i: checkpoint(clipped, m(x), use_reentrant=False) ** 2,
    "computed again, with reentry": lambda m, x, i: checkpoint(clipped, m(x), use_reentrant=True) ** 2,
}


def backwards(function: Function) -> Function:
    """The gradients of the weights by `backward`, for a loss in which every element has another weight."""

    def step(m: Any, x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        made = function(m, x, i)
        m.zero_grad()
        (made * torch.linspace(0.5, 2, made.numel(), device=x.device).reshape(made.shape)).sum().backward()
        return [weight.grad for weight in m.parameters() if weight.grad is not None]

    return step


@pytest.mark.parametrize("name", RUN_IN_BACKWARD)
def test_what_runs_in_the_backward_pass(name: str) -> None:
    check(backwards(RUN_IN_BACKWARD[name]), X, torch.arange(4))


def test_a_half_that_is_computed_again_in_the_backward_pass() -> None:
    def step(m: Any, x: torch.Tensor, multiply: Function) -> list[torch.Tensor]:
        made = checkpoint(lambda h: multiply(h, m.weight).float(), x.bfloat16(), use_reentrant=False)
        m.zero_grad()
        (made * made).sum().backward()
        return [made.detach(), m.weight.grad]

    traced = Traced(lambda m: lambda b: step(m, b, F.linear), nn.Linear(6, 3), X, double=False)
    weights = {"weight": traced.initial["state.model.weight"].clone()}
    plain = nn.Linear(6, 3)
    plain.load_state_dict(weights, strict=False)
    expected = step(plain, X, lambda h, w: F.linear(h, w.bfloat16()))
    for wafers in (1, 2):
        result = Simulation(traced.plan(wafers), traced.initial).run([[X]], 1)[0]
        for value, wanted in zip(result.values(), expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=2e-2, atol=2e-2)


def test_the_gradient_of_a_normalised_weight() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))
    check(lambda m, x: torch.autograd.grad(m(x).pow(2).sum(), list(m.parameters())), X, model=model)


def test_a_vector_beside_the_samples() -> None:
    """What is begun as a part of the batch and cut in the end leaves nothing that the wafers would wait for."""
    model = nn.Module()
    model.p, model.q = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor([0.5, 0.1, -0.4, 0.8]))

    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x + m.p
        return torch.autograd.grad(F.cosine_similarity(y, m.q, dim=0, eps=0.5), (y, m.p, m.q))[2]

    check(step, torch.tensor([0.3, -0.7, 1.1, 0.9]), model=model)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(2, 6),
    "batch": lambda: nn.BatchNorm1d(6),
}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_halves(name: str, is_mixed: bool, half: torch.dtype) -> None:
    """They differ from float32's by the rounding of operands and results."""
    model = NORMS[name]() if is_mixed else NORMS[name]().to(half)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))

    def step(m: Any, x: torch.Tensor) -> list[torch.Tensor]:
        made = m(x.to(half)).float()
        return [made, *(gradient.float() for gradient in torch.autograd.grad((made * made).sum(), m.parameters()))]

    traced = Traced(lambda m: lambda b: step(m, b), model, x, double=False)
    expected = step(NORMS[name](), x.to(half).float())
    for wafers in (1, 2):
        result = Simulation(traced.plan(wafers), traced.initial).run([[x]], 1)[0]
        for value, wanted in zip(result.values(), expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=2e-2, atol=5e-2)


def follow(half: torch.dtype) -> dict[str, tuple[Callable[[], nn.Module], Function, tuple[int, ...]]]:
    return {
        "linear": (lambda: nn.Linear(6, 3), lambda m, x: m(x.to(half)), (4, 6)),
        "convolution": (lambda: nn.Conv2d(3, 5, 3), lambda m, x: m(x.to(half)), (4, 3, 5, 5)),
        "products": (lambda: nn.Linear(6, 3), lambda m, x: (x.to(half) @ m.weight.t()) * m.bias, (4, 6)),
        "attention": (
            lambda: nn.MultiheadAttention(6, 2, batch_first=True),
            lambda m, x: m(*[x.to(half)] * 3, need_weights=False)[0],
            (4, 5, 6),
        ),
        "einsum": (lambda: nn.Linear(6, 3), lambda m, x: torch.einsum("bi,oi->bo", x.to(half), m.weight), (4, 6)),
    }


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", follow(torch.float16))
def test_weights_follow_halves(name: str, half: torch.dtype) -> None:
    make, function, shape = follow(half)[name]
    model, x = make(), torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def step(m: Any, x: torch.Tensor, function: Function = function) -> list[torch.Tensor]:
        made = function(m, x)
        loss = made.float().pow(2).sum()
        return [
            made.float(),
            *(g for g in torch.autograd.grad(loss, list(m.parameters()), allow_unused=True) if g is not None),
        ]

    traced = Traced(lambda m: lambda b: step(m, b), model, x, double=False)
    # Float32 throughout, of the same rounded samples: what is left is rounding of weights and products.
    expected = step(model, x.to(half).float(), lambda m, x: follow(torch.float32)[name][1](m, x))
    for wafers in (1, 2):
        result = Simulation(traced.plan(wafers), traced.initial).run([[x]], 1)[0]
        assert all(value.dtype is torch.float32 for value in result.values())
        for value, wanted in zip(result.values(), expected, strict=True):
            torch.testing.assert_close(
                value, wanted, rtol=5e-2, atol=5e-2 * max(1.0, float(wanted.detach().abs().max()))
            )


def test_the_product_of_a_half_is_a_half() -> None:
    traced = Traced(lambda m: lambda x: m(x.bfloat16()), nn.Linear(6, 3), X, double=False)
    (output,) = Simulation(traced.plan(1), traced.initial).run([[X]], 1)[0].values()
    assert output.dtype is torch.bfloat16


@pytest.mark.parametrize("wafers", [1, 2])
def test_a_constant_is_an_output_in_mixed_precision(wafers: int) -> None:
    def build(m: Any) -> Any:
        def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            loss = m(x).pow(2).mean()
            loss.backward()
            return loss.detach(), torch.tensor(3.0).to(x.device)

        return step

    traced = Traced(build, nn.Linear(6, 3), X, double=False)
    plan = traced.plan(wafers, precision=Precision(half=Half.FLOAT16, level=1))
    assert Simulation(plan, traced.initial).run([[X]], 1)[0]["output_1"] == 3


def test_autocast_by_the_type_of_the_device() -> None:
    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        assert torch.compiler.is_compiling() == torch.compiler.is_exporting() == (x.device.type != "cpu")
        with torch.autocast(device_type=x.device.type, enabled=False):
            made = m(x)
        with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16, enabled=False):
            return made + m(x)

    check(step, X)
    assert not torch.compiler.is_compiling()


REFUSED: dict[str, tuple[Function, str]] = {
    "as many values as chosen": (lambda m, x: assigned(x, x > 2, x.new_ones(3)), "masked_scatter"),
    "a mask among indices": (lambda m, x: assigned(x, (x[:, 0] > 0, torch.tensor([1])), 0.0), "one of several"),
    "complex numbers": (lambda m, x: torch.fft.rfft(x).abs(), r"`aten::_fft_r2c` makes complex numbers"),
    "a conjugate": (lambda m, x: torch.fft.hfft(x), "complex numbers"),
    "int8": (lambda m, x: x.to(torch.int8), "output_0 is an output; torch.int8 cannot be sent"),
    "an index that is not there": (lambda m, x: x[:, [6]], "out of bounds"),
    "roots of a polynomial": (lambda m, x: torch.linalg.eigvals(x[:, :4]), r"`aten::linalg_eig` makes complex"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises((CompileError, TraceError), match=message) as caught:
        Traced(lambda m: lambda x: function(m, x), nn.Linear(6, 3), X, double=False)
    assert "test_operations_of_users.py:" in str(caught.value)


def test_the_comparison_sees_beside_an_infinity() -> None:
    traced = Traced(lambda m: lambda x: x / (x - x[:, :1]), nn.Linear(6, 3), X, double=False)
    traced.reference = nn.Linear(6, 3)
    traced.build = lambda m: lambda x: 2 * x / (x - x[:, :1])
    with pytest.raises(AssertionError):
        traced.check([X], [(1, 1)])


def test_tokens_that_are_counted_by_expert_are_refused_with_the_way_out() -> None:
    """As experts do that get their tokens sorted: the shape of their products depends on values."""

    def step(tokens: torch.Tensor) -> torch.Tensor:
        counts = torch.histc(tokens[:, 0].float(), bins=2, min=0, max=1)
        weights = torch.ones(2, 16, 16, dtype=torch.bfloat16).to(tokens.device)
        return torch._grouped_mm(tokens, weights, offs=counts.cumsum(0, dtype=torch.int32))

    tokens = torch.ones(8, 16, dtype=torch.bfloat16)
    with pytest.raises(CompileError, match=r"`aten::_grouped_mm`.*as a batch, as most mixtures of transformers 5 do"):
        Traced(lambda m: step, nn.Module(), tokens, double=False)


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "sparse": {"sparse": True},
    "padded and sparse": {"sparse": True, "padding_idx": 0},
    "limited": {"max_norm": 1.0},
    "limited by the sum": {"max_norm": 0.5, "norm_type": 1.0, "padding_idx": 2},
}


@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embedding(name: str, kind: type[nn.Embedding | nn.EmbeddingBag]) -> None:
    def step(m: Any, i: torch.Tensor) -> list[torch.Tensor]:
        made = m(i)
        gradient = torch.autograd.grad((made * torch.linspace(0.5, 2, 5, device=i.device)).sum(), m.weight)[0]
        return [made, gradient.to_dense() if gradient.is_sparse else gradient]

    settings: dict[str, Any] = {"mode": "sum"} if kind is nn.EmbeddingBag else {}
    model = kind(7, 5, **settings, **EMBEDDINGS[name])
    with torch.no_grad():
        model.weight[4] *= 0.01
    rows = torch.tensor([[0, 3, 4], [3, 3, 2], [1, 0, 4], [2, 2, 2]])
    traced = Traced(lambda m: lambda batch: step(m, batch[0]), model, [rows], double=False)
    traced.check([[rows], [rows.flip(0)]], CLUSTERS, rtol=1e-5)
