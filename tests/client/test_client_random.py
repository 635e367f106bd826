"""Random operations as the client traces them, and the counter that their numbers come from."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster, StartCluster, State
from torch import nn
from torch.nn import functional as F
from traced_steps import Runner, run_module, trace

import cstorch
from cstorch._internal.lowering import lower
from cstorch._internal.tracing import COUNTER, DEVICE
from cstorch._internal.tracing.random_counter import random_counter
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import CompileError, TraceError
from cstorch.utils.data import DataExecutor, DataLoader
from waferbox.cirh.text.printer import print_module

X = torch.full((64, 50), 2.0)


def drawn(step: Any, batch: torch.Tensor = X) -> Any:
    traced = trace(step, batch)
    runner = Runner(traced, run_module(lower(traced)))
    results = runner.step(batch)
    assert runner.state[COUNTER] == random_counter.tensor().cpu() + 1
    assert all(not a.equal(b) for a, b in zip(results, runner.step(batch), strict=True)), "two steps drew the same"
    return results


def test_dropout_scales_what_stays() -> None:
    result, bits = drawn(lambda x: (F.dropout(x, 0.25), F.dropout(x.bfloat16(), 0.25)))
    for kept in (result, bits.float()):
        assert set(kept.unique().tolist()) == {0.0, kept.max().item()}
        assert kept.max().item() == pytest.approx(2 / 0.75, rel=1e-2)
        assert abs((kept > 0).float().mean().item() - 0.75) < 4 * math.sqrt(0.25 * 0.75 / X.numel())


def test_the_gradient_goes_through_what_stays() -> None:
    def step(x: Any) -> Any:
        x = x.detach().requires_grad_()
        result = F.dropout(x * 3, 0.5)
        result.sum().backward()
        return result.detach(), x.grad

    result, gradient = drawn(step)
    torch.testing.assert_close(gradient, result / 2, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("step", "mean", "std"),
    [
        (lambda x: torch.rand_like(x), 0.5, math.sqrt(1 / 12)),
        (lambda x: torch.rand(64, 50, device=DEVICE), 0.5, math.sqrt(1 / 12)),
        (lambda x: torch.rand(64, 50, dtype=torch.float64, device=DEVICE), 0.5, math.sqrt(1 / 12)),
        (lambda x: torch.randn_like(x), 0, 1),
        (lambda x: torch.randn(64, 50, device=DEVICE), 0, 1),
        (lambda x: torch.empty_like(x).uniform_(-2, 4), 1, math.sqrt(36 / 12)),
        (lambda x: torch.empty_like(x).normal_(3, 2), 3, 2),
        (lambda x: torch.normal(x, x * 2), 2, 4),
        (lambda x: torch.normal(5.0, x), 5, 2),
        (lambda x: torch.normal(1.0, 3.0, (64, 50), device=DEVICE), 1, 3),
        (lambda x: torch.empty_like(x).exponential_(0.5), 2, 2),
        (lambda x: torch.bernoulli(x / 8), 0.25, math.sqrt(3 / 16)),
        (lambda x: torch.bernoulli(x, 0.25), 0.25, math.sqrt(3 / 16)),
        (lambda x: torch.empty_like(x).bernoulli_(x / 4), 0.5, 0.5),
        (lambda x: torch.randint(0, 9, (64, 50), device=DEVICE), 4, math.sqrt(80 / 12)),
        (lambda x: torch.randint_like(x, -1, 2), 0, math.sqrt(8 / 12)),
        (lambda x: torch.empty_like(x).random_(0, 9), 4, math.sqrt(80 / 12)),
    ],
)
def test_distributions(step: Any, mean: float, std: float) -> None:
    (result,) = drawn(step)
    values = result.double()
    assert abs(values.mean().item() - mean) < 4 * std / math.sqrt(X.numel())
    assert values.std().item() == pytest.approx(std, rel=0.1)


def test_a_permutation() -> None:
    (order,) = drawn(lambda x: torch.randperm(1000, device=DEVICE))
    assert order.dtype is torch.int64
    assert not order.equal(torch.arange(1000))
    assert order.sort()[0].equal(torch.arange(1000))


def test_operations_draw_different_numbers_and_those_that_draw_nothing_take_none() -> None:
    first, second = drawn(lambda x: (torch.rand_like(x), torch.rand_like(x)))
    assert not first.equal(second)
    traced = trace(lambda x: F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0) + F.rrelu(x), X)
    assert traced.states == ()
    assert "Random" not in print_module(lower(traced))


def test_random_slopes_are_those_of_the_gradient() -> None:
    def step(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = batch.clone().requires_grad_()
        result = F.rrelu(leaf, 0.25, 0.5, training=True)
        (gradient,) = torch.autograd.grad(result.sum(), leaf)
        return result, gradient

    batch = torch.linspace(-3, 1, 4000)
    result, slopes = drawn(step, batch)
    assert result.equal(batch * slopes)
    assert slopes[batch > 0].eq(1).all()
    negative = slopes[batch <= 0]
    assert 0.25 <= negative.min() < 0.26 < 0.49 < negative.max() <= 0.5
    assert abs(negative.mean().item() - 0.375) < 0.01


def test_what_there_is_not_is_refused_with_the_line() -> None:
    with pytest.raises(
        CompileError, match=r"(?s)test_client_random.py:\d+.*aten::_fused_dropout.*there are dropout, rand"
    ):
        lower(trace(lambda x: torch.ops.aten._fused_dropout(x, 0.5)[0], X))
    with pytest.raises(CompileError, match=r"(?s)test_client_random.py:\d+.*without bounds.*random_\(0, 100\)"):
        lower(trace(lambda x: torch.empty_like(x).random_(), X))
    generator = torch.Generator()
    with pytest.raises(TraceError, match=r"test_client_random.py:\d+.*is given a generator.*torch.manual_seed"):
        trace(lambda x: torch.empty_like(x).normal_(generator=generator), X)


# -- executions


def count(state: State, step: int) -> dict[str, torch.Tensor]:
    state[COUNTER] += 1
    return {"output_values_0": torch.tensor(0.0)}


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    return start_cluster(count)


class Setup:
    def __init__(self, cluster: FakeCluster, tmp_path: Path) -> None:
        config = ClusterConfig(mgmt_address=cluster.address)
        cstorch.backend("CSX", artifact_dir=tmp_path, cluster_config=config)
        self.model = cstorch.compile(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
        self.step = cstorch.trace(lambda batch: self.model(batch).sum())

    def run(self, steps: int, body: Any = lambda: None, **settings: Any) -> None:
        executor = DataExecutor(DataLoader(lambda: [torch.ones(4, 2)] * 20), num_steps=steps, **settings)
        for batch in executor:
            self.step(batch)
            body()


def test_executions_go_on_and_a_checkpoint_continues(cluster: FakeCluster, tmp_path: Path) -> None:
    torch.manual_seed(3)
    setup = Setup(cluster, tmp_path)
    start = cstorch.get_rng_state()
    paths = iter([tmp_path / "2.h5", tmp_path / "3.h5"])
    save = cstorch.checkpoint_closure(lambda: cstorch.save({"random": cstorch.get_rng_state()}, next(paths)))
    setup.run(3, save, checkpoint_steps=2)
    assert cstorch.get_rng_state() == start + 3
    setup.run(2)
    assert cluster.live[COUNTER] == start + 5
    assert COUNTER not in cluster.written[1]
    cstorch.set_rng_state(cstorch.load(tmp_path / "2.h5")["random"])
    setup.run(1)
    assert cluster.live[COUNTER] == start + 3
    torch.manual_seed(4)
    setup.run(1)
    other = cluster.live[COUNTER]
    assert abs(other - start) > 1000
    cstorch.close_backend()
    torch.manual_seed(3)
    setup = Setup(cluster, tmp_path)
    assert cstorch.get_rng_state() == start


def test_a_lost_counter_goes_on_elsewhere(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cstorch.backends.csx.cluster, "max_num_restarts", 0)  # no recovery points: it is lost
    setup = Setup(cluster, tmp_path)
    start = cstorch.get_rng_state()
    setup.run(2)
    executor = DataExecutor(DataLoader(lambda: [torch.ones(4, 2)] * 20), num_steps=10)
    for number, batch in enumerate(executor):
        setup.step(batch)
        if number == 2:
            break
    assert abs(cstorch.get_rng_state() - start) > 1000
    with torch.no_grad():
        setup.model.load_state_dict({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})
    setup.run(1)


def test_the_cpu_has_torchs_own_generator() -> None:
    cstorch.backend("CPU")
    state = cstorch.get_rng_state()
    assert state.equal(torch.get_rng_state())
    first = torch.rand(3)
    cstorch.set_rng_state(state)
    assert torch.rand(3).equal(first)
    with pytest.raises(ValueError, match="another backend"):
        cstorch.set_rng_state(torch.tensor(5))
