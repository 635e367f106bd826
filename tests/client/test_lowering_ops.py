"""Each operation lowered and run by CIRH's own calls equals plain torch, with broadcasting and type promotion."""

import pytest
import torch
from torch.nn import functional as F
from traced_steps import Runner, run_module, trace

from cirh.dialect.attributes import attrs
from cirh.dialect.operations import func_of
from cirh.modules.verify import verify
from cirh.text.parser import parse_module
from cirh.text.printer import print_module
from cstorch.errors import CompileError
from cstorch.lowering import lower
from cstorch.tracing import device_scope

G = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, generator=G)
Y = torch.rand(4, 6, generator=G) + 0.5
ROW = torch.rand(6, generator=G) + 0.5
COLUMN = torch.rand(4, 1, generator=G)
N = torch.randint(1, 9, (4, 6), generator=G)
MASK = torch.rand(4, 6, generator=G) > 0.5
WIDE = torch.randn(4, 6, generator=G, dtype=torch.float64)
LABELS = torch.tensor([1, 0, -100, 5])
ARGUMENTS = (X, Y, ROW, COLUMN, N, MASK, WIDE, LABELS)


def lowered(step, batch, states=None):
    traced = trace(step, batch, states)
    module = lower(traced)
    text = print_module(module)
    parsed = parse_module(text)
    verify(parsed)
    assert print_module(parsed) == text
    return traced, module


def names_in(module):
    return [op.name for op in func_of(module).block.ops if op.name not in ("cirh.Const", "cirh.return")]


def check(function, batch=ARGUMENTS):
    traced, module = lowered(lambda batch: function(*batch), batch)
    results = Runner(traced, run_module(module)).step(batch)
    expected = [t for t in torch.utils._pytree.tree_leaves(function(*batch)) if isinstance(t, torch.Tensor)]
    for result, value in zip(results, expected, strict=True):
        assert result.dtype == value.dtype
        torch.testing.assert_close(result, value)
    return module


CASES = {
    "add": lambda x, y, row, column, n, mask, wide, labels: (
        x + y,
        x + row,
        row + column,
        x + n,
        n + 2,
        n + 2.5,
        mask + 1,
    ),
    "add alpha": lambda x, y, row, column, n, mask, wide, labels: (
        torch.add(x, row, alpha=2),
        torch.sub(n, n, alpha=3),
    ),
    "sub": lambda x, y, row, column, n, mask, wide, labels: (
        x - 1,
        1 - x,
        3 - n,
        row - column,
        torch.rsub(x, y, alpha=2),
    ),
    "mul": lambda x, y, row, column, n, mask, wide, labels: (x * 0.1, x * mask, x * wide, n * 0.5, n * row.sum()),
    "div": lambda x, y, row, column, n, mask, wide, labels: (
        x / y,
        x / 3,
        n / 3,
        n / n,
        1 / y,
        n // 2,
        torch.div(n, 2, rounding_mode="trunc"),
    ),
    "div rounding": lambda x, y, row, column, n, mask, wide, labels: (
        torch.div(x, row, rounding_mode="floor"),
        torch.div(x, 0.3, rounding_mode="trunc"),
        x % 0.7,
        x.fmod(0.7),
        n % 3,
        x % row,
    ),
    "pow": lambda x, y, row, column, n, mask, wide, labels: (x**2, y**0.5, y**row, 0.9**y, 2**n, n**2),
    "comparisons": lambda x, y, row, column, n, mask, wide, labels: (
        x > y,
        x >= 0,
        x < row,
        n <= 3,
        n == 2.5,
        x != y,
        n < x,
        wide > x,
    ),
    "logic": lambda x, y, row, column, n, mask, wide, labels: (
        mask & (x > 0),
        mask | (x > 0),
        mask ^ (x > 0),
        ~mask,
        ~n,
        n & 3,
        n | n,
        x.logical_and(y),
        x.logical_not(),
        x.logical_or(n),
    ),
    "where": lambda x, y, row, column, n, mask, wide, labels: (
        torch.where(mask, x, 0.0),
        torch.where(x > 0, x, row),
        torch.where(mask, 1.0, 2.0),
        torch.where(mask, n, x),
        x.masked_fill(mask, -1e9),
        x.masked_fill(row > 1, 0),
    ),
    "clamp": lambda x, y, row, column, n, mask, wide, labels: (
        x.clamp(-0.5, 0.5),
        x.clamp(min=0),
        x.clamp(max=0.1),
        x.clamp(min=row),
        torch.clamp(x, row - 1, row),
        n.clamp(2, 5),
        x.clamp_min(0.2),
        x.clamp_max(0.2),
        torch.maximum(x, row),
        torch.minimum(x, y),
    ),
    "unary": lambda x, y, row, column, n, mask, wide, labels: (
        x.tanh(),
        x.relu(),
        y.sqrt(),
        y.rsqrt(),
        x.exp(),
        y.log(),
        x.sigmoid(),
        x.abs(),
        -x,
        x.cos(),
        x.sin(),
        x.floor(),
        x.ceil(),
        x.sign(),
        x.erf(),
        y.reciprocal(),
        x.round(),
        n.sqrt(),
        n.exp(),
        n.relu(),
        F.gelu(x),
        F.gelu(x, approximate="tanh"),
        x.sgn(),
        x.square(),
        y.log1p(),
        x.trunc(),
        torch.atan2(x, y),
    ),
    "tests of numbers": lambda x, y, row, column, n, mask, wide, labels: (
        x.isnan(),
        (x / 0).isfinite(),
        (x / 0).isinf(),
    ),
    "three": lambda x, y, row, column, n, mask, wide, labels: (
        torch.addcmul(x, y, row, value=0.5),
        torch.addcdiv(x, x, y, value=2),
        torch.lerp(x, y, 0.3),
        torch.lerp(x, row, y),
    ),
    "sums": lambda x, y, row, column, n, mask, wide, labels: (
        x.sum(),
        x.sum(0),
        x.sum(-1, keepdim=True),
        mask.sum(),
        mask.sum(1),
        x.sum((0, 1)),
        x.amax(1),
        x.amin((0, 1)),
        x.max(),
        n.min(),
        x.mean(),
        x.mean(1),
        x.mean((0, 1), keepdim=True),
        x.prod(),
        x.prod(1),
        x.sum(dtype=torch.float64),
    ),
    "other reductions": lambda x, y, row, column, n, mask, wide, labels: (
        x.argmax(),
        x.argmax(1),
        x.argmin(0, keepdim=True),
        x.max(1),
        mask.any(),
        mask.all(1),
        x.norm(),
        x.norm(dim=1),
        x.var(),
        x.std(1),
        x.var(1, unbiased=False),
        x.cumsum(1),
        x.logsumexp(1),
        torch.linalg.vector_norm(x, 1),
        (x == y).float().mean(),
    ),
    "views": lambda x, y, row, column, n, mask, wide, labels: (
        x.view(24),
        x.reshape(3, 8),
        x.t(),
        x.transpose(0, 1),
        x.permute(1, 0),
        x[None],
        column.squeeze(-1),
        column.expand(4, 3),
        x.flatten(),
        x.view(2, 2, 6).permute(2, 0, 1),
        x.view(2, 2, 6).transpose(-1, 0),
        x.mT,
        row.view(1, 6).expand(4, -1),
        x.t().reshape(24),
    ),
    "parts": lambda x, y, row, column, n, mask, wide, labels: (
        x[1],
        x[:, 2],
        x[1:3],
        x[:, ::2],
        x[-1],
        x[..., -2:],
        x.split(2),
        x.chunk(3, 1),
        x.split([1, 3]),
        x.unbind(0),
        x[:],
        x.narrow(1, 1, 2),
        x.select(1, -1),
    ),
    "joins": lambda x, y, row, column, n, mask, wide, labels: (
        torch.cat([x, y]),
        torch.cat([x, n], 1),
        torch.stack([x, y]),
        torch.stack([x.sum(), y.sum()]),
        torch.cat([x], -1),
        x.repeat(2, 1),
        x.flip(0),
        torch.cat([torch.zeros(0, device=x.device), row]),
    ),
    "indices": lambda x, y, row, column, n, mask, wide, labels: (
        x[n[:, 0] % 4],
        x[:, n[0] % 6],
        x[n % 4],
        x[n[:, 0] % 4, n[:, 1] % 6],
        x.gather(1, n % 6),
        x.index_select(1, n[0] % 6),
    ),
    "several indices": lambda x, y, row, column, n, mask, wide, labels: (
        x.view(4, 2, 3)[:, n[0] % 2, n[1] % 3],
        x.view(4, 2, 3)[n[:, 0] % 4, :, n[:, 1] % 3],
        x.view(4, 2, 3)[:, n % 2, n % 3],
        x.view(4, 2, 3).index_put((n[:, 0] % 4, n[:, 1] % 2), row[:3]),
        torch.ops.aten.index_put(x, [None, n[0, :2] % 3], x[:, :2], True),
        torch.ops.aten.index_put(x.view(4, 2, 3), [None, n[0] % 2, n[1] % 3], row, True),
        torch.ops.aten.index_put(x.view(4, 2, 3), [n[:, 0] % 4, None, n[:, 1] % 3], y[:, :2], True),
    ),
    "repeats": lambda x, y, row, column, n, mask, wide, labels: (
        row.repeat(3),
        row.repeat(2, 1, 2),
        x.repeat(1, 3),
        x.repeat(2, 2, 3),
        torch.tile(column, (2, 2)),
    ),
    "shuffles": lambda x, y, row, column, n, mask, wide, labels: (
        F.pixel_shuffle(x.view(1, 4, 2, 3), 2),
        F.pixel_unshuffle(x.view(2, 3, 2, 2), 2),
        F.channel_shuffle(x.view(1, 4, 2, 3), 2),
        torch.roll(x, (1, 2), (0, 1)),
    ),
    "products": lambda x, y, row, column, n, mask, wide, labels: (
        x @ y.t(),
        x @ row,
        torch.addmm(row, x, y.t() @ y),
        torch.bmm(x[None], y.t()[None]),
        x.view(2, 2, 6) @ y.t(),
        row @ row,
    ),
    "constants": lambda x, y, row, column, n, mask, wide, labels: (
        torch.zeros_like(x),
        torch.ones(3, device=x.device),
        torch.full((2, 2), 7, device=x.device),
        x.new_zeros(3),
        torch.full_like(n, 3),
        x.new_full((2,), 1.5),
        torch.arange(5, device=x.device),
        torch.arange(1, 2, 0.25, device=x.device),
        torch.tensor([1, 2], device=x.device),
        torch.ones_like(x, dtype=torch.bool),
        x.new_tensor(3.0),
        torch.tensor(float("-inf"), device=x.device) + x,
    ),
    "casts": lambda x, y, row, column, n, mask, wide, labels: (
        x.double(),
        n.float(),
        x.long(),
        x.bool(),
        mask.float(),
        wide.float(),
        x.to(torch.bfloat16).float(),
        x.half().float(),
    ),
    "softmax": lambda x, y, row, column, n, mask, wide, labels: (
        x.softmax(-1),
        x.log_softmax(0),
        F.softmax(x, 1, dtype=torch.float64),
    ),
    "losses": lambda x, y, row, column, n, mask, wide, labels: (
        F.cross_entropy(x, labels),
        F.cross_entropy(x, labels, reduction="sum"),
        F.cross_entropy(x, labels, weight=row),
        F.mse_loss(x, y),
        F.cross_entropy(x, labels, label_smoothing=0.1),
        F.binary_cross_entropy_with_logits(x, y),
        F.smooth_l1_loss(x, y),
        F.l1_loss(x, y),
        F.cross_entropy(x, F.softmax(y, 1)),
        F.nll_loss(x, labels, reduction="none"),
    ),
    "layers": lambda x, y, row, column, n, mask, wide, labels: (
        F.layer_norm(x, (6,), row, row),
        F.layer_norm(x, (6,)),
        F.embedding(n % 4, y),
        F.linear(x, y, row[:4]),
        F.silu(x),
        F.leaky_relu(x),
        F.elu(x),
        F.hardtanh(x),
        F.softplus(x),
        F.dropout(x, 0.0),
        F.dropout(x, 0.5, training=False),
        x.tril(),
        x.triu(1),
    ),
    "writes": lambda x, y, row, column, n, mask, wide, labels: (
        x.clone().add_(1).mul_(row),
        torch.empty_like(x).fill_(2),
        torch.empty(3, device=x.device).zero_(),
        x.clone().copy_(row),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_operations_equal_torch(case):
    check(case)


def test_writes_to_parts():
    def step(x, y):
        z = x.clone()
        z[1] = 5
        z[:, 2:4] += y[:, 2:4]
        z[2:4].mul_(2)
        z.t()[0].copy_(y[:, 0])
        return z

    check(step, (X, Y))


def gradients(x, y, row, n):
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


def test_gradients_equal_torch():
    check(gradients, (X, Y, ROW, N))


def test_dimensions_that_only_the_result_has_are_counted_in_it():
    """The gradient of a selection puts a dimension back; a stack adds one."""

    def selected(x):
        x = x.detach().requires_grad_()
        (x[:, 1].pow(2).sum() + x[:, -2].exp().sum() + torch.select(x, -1, 0).sum()).backward()
        return x.grad, torch.stack([x, x * 2], -1), torch.stack([x, x * 2], 2), torch.stack([x[0], x[1]], 1)

    check(selected, (X,))


def test_one_value_stays_one_element():
    module = check(lambda x: (x * 0.5, torch.full((1 << 12, 1 << 12), 2.0, device=x.device).sum(0)[:6] * x), (X,))
    assert len(print_module(module, locations=False)) < 3000


def test_copies_are_erased_and_t_stays():
    module = check(lambda x, y: x.clone().detach().contiguous().view(4, 6) @ y.t(), (X, Y))
    assert names_in(module) == ["cirh.Transpose", "cirh.MatMul"]


def test_composites_stay_whole():
    module = check(lambda x, labels: F.cross_entropy(x, labels), (X, LABELS))
    assert names_in(module) == ["aten._log_softmax", "aten.nll_loss_forward"]
    (loss,) = [op for op in func_of(module).block.ops if op.name == "aten.nll_loss_forward"]
    assert attrs(loss) == {"operand_segments": [1, 1, 0], "reduction": 1, "ignore_index": -100}


def test_views_made_before_the_step():
    with device_scope():
        w = torch.arange(24.0).view(4, 6)
        rows, columns, every_second = w[1:3], w.t()[2:4], w[:, ::2]

    def step(x):
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


def test_unknown_operations_are_refused():
    with pytest.raises(CompileError, match=r"(?s)test_lowering_ops.py:\d+.*aten::linalg_.*Write it with other"):
        lower(trace(lambda x: torch.linalg.inv(x[:, :4]), X))
