"""Operations that mix samples where no sharding rule holds: operands are gathered, and results cut again."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Traced, simulate
from reported_steps import MACHINE
from torch import nn
from torch.nn import functional as F

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import ExecutionStrategy, Half, Precision
from appliance.compiler.plan_check.check import PlanError, check_plan
from appliance.compiler.report.builder import make_report
from appliance.compiler.report.page import report_page
from cstorch._internal.state import Registry, named_getters
from cstorch.optim import SGD
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.text.parser import parse_module
from wsc.v1 import plan_pb2

pytestmark = pytest.mark.parity

WAFERS = [(1, 1), (2, 2), (3, 1)]
X = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(0)).double()
LABELS = torch.arange(BATCH) % 3
Loss = Callable[[Any, Any], torch.Tensor]


def training(loss_of: Loss) -> Any:
    """A step of gradient descent with momentum."""

    def build(model: Any) -> Any:
        registry = Registry()
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        registry.register("optimizer", optimizer)

        def step(batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, dict(named_getters(registry))

    return build


# -- whole scripts that were reported to fail elsewhere


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.head = nn.Conv1d(4, 6, 3, groups=2), nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.softplus(self.conv(x)).flatten(1))


class Moco(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 36), dim=0))


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.vector = nn.Linear(6, 6), nn.Parameter(torch.randn(6))


def supervised_contrastive(model: Any, batch: Any) -> torch.Tensor:
    x, labels = batch
    features = F.normalize(model(x), dim=1)
    scores = features @ features.t() / 0.1
    scores = scores - scores.max(1, keepdim=True).values.detach()
    others = 1 - torch.eye(len(x), device=x.device, dtype=x.dtype)
    same = (labels[:, None] == labels[None]).to(x.dtype) * others
    log_odds = scores - (scores.exp() * others).sum(1, keepdim=True).log()
    return -((same * log_odds).sum(1) / same.sum(1)).mean()


def hard_triplets(model: Any, batch: Any) -> torch.Tensor:
    x, labels = batch
    features = model(x)
    distances = (features[:, None] - features[None]).square().sum(-1)
    same = labels[:, None] == labels[None]
    farthest = distances.masked_fill(~same, 0).max(1).values
    nearest = distances.masked_fill(same, 1e9).min(1).values
    return F.relu(farthest - nearest + 0.5).mean()


def queue_of_negatives(model: Any, batch: Any) -> torch.Tensor:
    x, _ = batch
    query = F.normalize(model.query(x), dim=1)
    with torch.no_grad():
        for ours, theirs in zip(model.query.parameters(), model.key.parameters(), strict=True):
            theirs.mul_(0.9).add_(ours * 0.1)
        key = F.normalize(model.key(x.flip(1)), dim=1)
    scores = torch.cat([(query * key).sum(1, keepdim=True), query @ model.queue.clone()], 1) / 0.2
    model.queue.copy_(torch.cat([key.t(), model.queue], 1)[:, : model.queue.shape[1]])
    return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long, device=x.device))


def gradient_penalty(model: Any, batch: Any) -> torch.Tensor:
    real, fake, mix = batch
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    score = model(between)
    (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
    penalty = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
    return model(fake).mean() - model(real).mean() + 10 * penalty


def accumulation(model: Any, batch: Any) -> torch.Tensor:
    """Gradients of four parts of the batch, added in one step. On two wafers a part has an odd number of rows."""
    total = torch.zeros((), dtype=batch[0].dtype, device=batch[0].device)
    *parts, last = zip(*(tensor.chunk(4) for tensor in batch), strict=True)
    for x, labels in parts:
        loss = F.cross_entropy(model(x), labels) / 4
        loss.backward()
        total = total + loss.detach()
    return F.cross_entropy(model(last[0]), last[1]) / 4 + total


def mixup(model: Any, batch: Any) -> torch.Tensor:
    x, labels = batch
    hot = F.one_hot(labels, 4).to(x.dtype)
    x, hot = 0.7 * x + 0.3 * x.flip(0), 0.7 * hot + 0.3 * hot.flip(0)
    x, hot = 0.9 * x + 0.1 * x.roll(1, 0), 0.9 * hot + 0.1 * hot.roll(1, 0)
    return -(hot * F.log_softmax(model(x), 1)).sum(1).mean()


def added_matrix_vector(model: Any, batch: Any) -> torch.Tensor:
    x, _ = batch
    return torch.addmv(x[:, 0], model.net(x), model.vector, beta=0.5, alpha=2).square().mean()


def images(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    real, fake = (torch.randn(BATCH, 4, 6, generator=generator).double() for _ in range(2))
    return real, fake + 1, torch.rand(BATCH, 1, 1, generator=generator).double()


ROWS = [(X, LABELS), (X.square(), LABELS.flip(0))]


@pytest.mark.parametrize(
    ("loss_of", "make", "batches"),
    [
        (supervised_contrastive, network, ROWS),
        (hard_triplets, network, ROWS),
        (queue_of_negatives, Moco, ROWS),
        (gradient_penalty, Critic, [images(1), images(2)]),
        (accumulation, network, ROWS),
        (mixup, network, ROWS),
        (added_matrix_vector, Bias, ROWS),
    ],
)
def test_training_gives_what_plain_torch_gives(loss_of: Loss, make: Callable[[], nn.Module], batches: Any) -> None:
    traced = Traced(training(loss_of), make(), batches[0])
    traced.check(batches, WAFERS, seeds=(0, 1))
    traced.check(batches, [(2, 1)], micro_batches=3)


# -- single operations


def gradients(loss_of: Loss) -> Any:
    def build(model: Any) -> Any:
        def step(x: Any) -> Any:
            model.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]

        return step

    return build


@functools.cache
def traced_of(loss_of: Loss) -> Traced:
    torch.manual_seed(0)
    return Traced(gradients(loss_of), nn.Linear(6, 6), X)


@pytest.mark.parametrize(
    "values_of",
    [
        lambda y: y.kthvalue(2, 0).values,
        lambda y: y[:, :1] + y[:, :1].t(),
        lambda y: y.cumsum(0),
        lambda y: y[:5],
        lambda y: y[:6].tanh(),
        lambda y: y[0],
        lambda y: y[torch.tensor([1, 0] * 6, device=y.device)],
        lambda y: y.reshape(-1)[:7],
        lambda y: y.reshape(9, 8).cumsum(0),
        lambda y: y * y.argmax(0),
        lambda y: y.sort(0).values * y,
        lambda y: torch.cat([y, y.t() @ y]),
        lambda y: y.prod(0),
        lambda y: y.norm(3, 0),
        lambda y: torch.linalg.vector_norm(y.half(), dim=0, dtype=torch.float64),
        lambda y: y.median(0).values,
        lambda y: torch.addmm(y[:6, :6], y.t(), y, beta=0.5, alpha=2),
        lambda y: F.layer_norm(y, (BATCH, 6)),
        lambda y: y.flip(0).cumsum(0).roll(3, 0),
    ],
)
def test_an_operation_on_all_samples(values_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    traced = traced_of(lambda model, x: values_of(model(x)).square().sum())
    traced.check([X, X * 0.5], WAFERS)
    traced.check([X], [(2, 1)], micro_batches=2)
    traced.check([X], [(1, 1)], micro_batches=2, execution_strategy=ExecutionStrategy.PIPELINE)


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(BATCH, 6))


@pytest.mark.parametrize("keep", [lambda kept, x: kept.copy_(x), lambda kept, x: kept.mul_(0.5).add_(x.cumsum(0))])
def test_a_state_that_has_rows_of_the_batch(keep: Any) -> None:
    def build(model: Any) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            before = (model.kept * x).sum()
            keep(model.kept, x)
            return before

        return step

    traced = Traced(build, Memory(), X)
    traced.check([X, X + 1, X * 2], WAFERS)
    with pytest.raises(
        CompileError, match=r"state.model.kept keeps all samples|test_mixed_samples.py:\d+: aten.cumsum"
    ):
        traced.plan(2, strict_sharding=True)


def test_random_numbers_are_the_same_on_any_number_of_wafers() -> None:
    def build(model: Any) -> Any:
        def step(x: torch.Tensor) -> Any:
            x = F.dropout(x, 0.5).flip(0) + torch.rand_like(x).sort(0).values
            return F.dropout(model(x), 0.5).cumsum(0)

        return step

    torch.manual_seed(3)
    traced = Traced(build, nn.Linear(6, 6), X)
    one, *others = (simulate(traced.plan(wafers), traced.initial).run([[X], [X]]) for wafers in (1, 2, 3))
    assert not torch.equal(one[0]["output_0"], one[1]["output_0"])
    for other in others:
        for expected, actual in zip(one, other, strict=True):
            torch.testing.assert_close(actual["output_0"], expected["output_0"])


@pytest.mark.parametrize("half_gradients", [False, True])
def test_in_half_precision(half_gradients: bool) -> None:
    torch.manual_seed(1)
    traced = Traced(training(mixup), nn.Linear(6, 4), (X.float(), LABELS), double=False)
    precision = Precision(half=Half.BFLOAT16, half_gradients=half_gradients)
    traced.check([(X.float(), LABELS)], [(1, 1), (2, 2), (3, 1)], rtol=3e-2, precision=precision)


# -- what is gathered, and where the work is done


def wafer_operations(plan: plan_pb2.Plan, name: str) -> list[Any]:
    modules = [parse_module(kernel.cirh) for kernel in plan.wafer.kernels]
    return [op for module in modules for op in body_ops(module) if op.name == name]


def test_results_are_cut_again() -> None:
    """A network behind a flip is computed in parts: each wafer has a product of its own rows."""
    plan = traced_of(lambda model, x: model(x.flip(0)).square().sum()).plan(2)
    (product,) = wafer_operations(plan, "aten.addmm")
    assert "tensor<6x6xf64>" in str(product.results[0].type)


def test_what_is_whole_already_is_not_gathered_again() -> None:
    plan = traced_of(lambda model, x: model(x.flip(0).cumsum(0).sort(0).values).square().sum()).plan(2)
    assert len(wafer_operations(plan, "aten.index_add")) == len(plan.gathered) == 1


def test_one_of_two_operands_is_gathered_if_that_is_enough() -> None:
    """Samples that the batch names: the indices stay cut, and so do the results."""
    step = lambda model, x: model(x[(x[:, 0] > 0).long()]).square().sum()  # noqa: E731
    traced = traced_of(step)
    traced.check([X], WAFERS)
    (gathered,) = make_report(traced.plan(2), "", MACHINE).gathering.lines
    assert gathered.nbytes == 2 * BATCH * 6 * 8  # there and back


def test_what_is_broadcast_is_gathered_before() -> None:
    """The labels, not the matrix in which each is compared with each other."""

    def build(model: Any) -> Any:
        return lambda labels: (labels[:, None] == labels[None]).sum(1)

    traced = Traced(build, nn.Module(), LABELS)
    traced.check([LABELS], WAFERS)
    (gathered,) = make_report(traced.plan(2), "", MACHINE).gathering.lines
    assert gathered.nbytes == 2 * BATCH * 8


# -- what the user sees


def flipped(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x.flip(0)).square().sum()


def test_the_report_has_lines_bytes_and_the_share_of_the_time() -> None:
    report = make_report(traced_of(flipped).plan(2), "", MACHINE)
    (line,) = report.gathering.lines
    assert line.source.startswith("tests/appliance/compiler/test_mixed_samples.py:")
    assert line.nbytes == 2 * BATCH * 6 * 8
    assert 0 < report.gathering.time_share < 1
    warning = report.gathering.warning()
    flips = "aten.flip acts on the dimension of the samples (sharded in dimension 0)"
    assert f"{line.source}: {flips} (1.12 KiB a step)" in warning
    assert f"{report.gathering.share_text} of the predicted time" in warning
    assert "strict_sharding" in warning
    assert line.source in report_page(report)


def test_nothing_is_reported_where_nothing_is_gathered() -> None:
    for traced, wafers in ((traced_of(flipped), 1), (traced_of(lambda model, x: model(x).square().sum()), 2)):
        report = make_report(traced.plan(wafers, strict_sharding=True), "", MACHINE)
        assert report.gathering.warning() == ""
        assert "Gathered" not in report_page(report)


def test_work_on_rows_that_cannot_be_cut_again_counts_as_gathering() -> None:
    """MemoryX computes with five rows for two wafers."""
    first_rows = traced_of(lambda model, x: model(x[:5]).square().sum() + model(x).sum())
    share = make_report(first_rows.plan(2), "", MACHINE).gathering.time_share
    assert share > make_report(traced_of(flipped).plan(2), "", MACHINE).gathering.time_share


def test_strict_sharding_refuses_and_names_all_lines() -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        first = model(x.flip(0))
        second = model(x.square().cumsum(0))
        return (first * second).sum()

    with pytest.raises(CompileError, match=r"sharding is strict: .*num_csx=1.*strict_sharding = False") as caught:
        traced_of(step).plan(2, strict_sharding=True)
    line = step.__code__.co_firstlineno
    for number, name in ((line + 1, "aten.flip"), (line + 2, "aten.cumsum")):
        assert f"test_mixed_samples.py:{number}: {name} " in str(caught.value)


def test_a_plan_that_gathers_what_is_not_sent_is_refused() -> None:
    plan = traced_of(flipped).plan(2)
    plan.gathered[0].value += 1000
    with pytest.raises(PlanError, match="gathered"):
        check_plan(plan)
