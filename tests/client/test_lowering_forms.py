"""What becomes of operations when they are lowered: writes, gradients, views, composites."""

import pytest
import torch
from lowered_operations import LABELS, ROW, N, X, Y, check, lowered, names_in
from torch.nn import functional as F
from traced_steps import Runner, run_module, trace

from cstorch._internal.lowering import lower
from cstorch._internal.tracing import device_scope
from cstorch.errors import CompileError
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.operations import func_of
from waferbox.cirh.text.printer import print_module


def test_writes_to_parts() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        z[1] = 5
        z[:, 2:4] += y[:, 2:4]
        z[2:4].mul_(2)
        z.t()[0].copy_(y[:, 0])
        return z

    check(step, (X, Y))


def gradients(x: torch.Tensor, y: torch.Tensor, row: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, y, row = (t.detach().clone().requires_grad_() for t in (x, y, row))
    h = F.gelu(F.layer_norm(x * row, (6,), row, row)).tanh() + F.silu(x).relu() + F.sigmoid(y) + F.leaky_relu(x).exp()
    h = h[:, 1:5].softmax(1) @ y[:4, :3] + F.embedding(n[:, :3] % 4, y).sum(-1) + torch.cat([x[:, :2], y[:, :1]], 1)
    h = (
        h
        + x.max(1).values[:, None]
        + x.std(1, keepdim=True)
        + x.norm()
        + F.softplus(x).mean()
        + (x / y).log().abs().nan_to_num(0, 0, 0).sum()
    )
    F.cross_entropy(h, n[:, 0] % 3).backward()
    return x.grad, y.grad, row.grad


def test_gradients_equal_torch() -> None:
    check(gradients, (X, Y, ROW, N))


def test_dimensions_that_only_the_result_has_are_counted_in_it() -> None:
    """The gradient of a selection puts a dimension back; a stack adds one."""

    def selected(x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x = x.detach().requires_grad_()
        (x[:, 1].pow(2).sum() + x[:, -2].exp().sum() + torch.select(x, -1, 0).sum()).backward()
        return x.grad, torch.stack([x, x * 2], -1), torch.stack([x, x * 2], 2), torch.stack([x[0], x[1]], 1)

    check(selected, (X,))


def test_one_value_stays_one_element() -> None:
    module = check(lambda x: (x * 0.5, torch.full((1 << 12, 1 << 12), 2.0, device=x.device).sum(0)[:6] * x), (X,))
    assert len(print_module(module, locations=False)) < 3000


def test_copies_are_erased_and_t_stays() -> None:
    module = check(lambda x, y: x.clone().detach().contiguous().view(4, 6) @ y.t(), (X, Y))
    assert names_in(module) == ["cirh.Transpose", "cirh.MatMul"]


def test_composites_stay_whole() -> None:
    module = check(lambda x, labels: F.cross_entropy(x, labels), (X, LABELS))
    assert names_in(module) == ["aten._log_softmax", "aten.nll_loss_forward"]
    (loss,) = [op for op in func_of(module).block.ops if op.name == "aten.nll_loss_forward"]
    assert attrs(loss) == {"operand_segments": [1, 1, 0], "reduction": 1, "ignore_index": -100}


def test_views_made_before_the_step() -> None:
    with device_scope():
        w = torch.arange(24.0).view(4, 6)
        rows, columns, every_second = w[1:3], w.t()[2:4], w[:, ::2]

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows.add_(1)
        columns.mul_(2)
        every_second.sub_(x[:, :3])
        return rows * 1, columns * 1, every_second * 1

    traced, module = lowered(step, X, states={"state.w": lambda: w})
    runner = Runner(traced, run_module(module))
    results = runner.step(X)
    expected = torch.arange(24.0).view(4, 6)
    expected[1:3] += 1
    expected.t()[2:4] *= 2
    expected[:, ::2] -= X[:, :3]
    assert torch.equal(runner.state["state.w"], expected)
    for result, value in zip(results, (expected[1:3], expected.t()[2:4], expected[:, ::2]), strict=True):
        assert torch.equal(result, value)


def test_unknown_operations_are_refused() -> None:
    with pytest.raises(CompileError, match=r"(?s)test_lowering_forms.py:\d+.*aten::frexp.*Write it with other"):
        lower(trace(lambda x: torch.frexp(x).mantissa, X))
