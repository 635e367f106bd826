"""Gradients that travel in half: which values do, what each wafer and SwarmX round, and that nothing else changes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import simulated_roles
import torch
from compiled_steps import BATCH, Step, Traced, one_at_a_time
from plan_simulator import Simulation
from reported_steps import MACHINE
from simulated_links import Frame
from test_compiler_precision_parity import BOUND, WORDS, Transformer, error, plain, simulated, text
from test_compiler_precision_parity import CASES as AGAINST_AUTOCAST
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from appliance.compiler.artifacts import artifact_key
from appliance.compiler.core.target import ExecutionStrategy
from appliance.compiler.cost.kernel_profile import profile_kernels
from appliance.compiler.pipeline import CompileError, Half, Precision, Target
from appliance.compiler.report.builder import make_report
from appliance.compiler.report.page import report_page
from appliance.compiler.wafer_schedule.memory_plan import plan_memory
from waferbox.links.elements import torch_dtype
from waferbox.prediction.prediction import predict
from waferbox.prediction.simulation import Compute, Rates
from wsc.v1 import plan_pb2

pytestmark = pytest.mark.parity

REDUCTION = plan_pb2.GROUP_KIND_REDUCTION
WIDE = Precision(half=Half.BFLOAT16)
BF16, F16 = (Precision(half=half, half_gradients=True) for half in (Half.BFLOAT16, Half.FLOAT16))
DTYPES = {Half.BFLOAT16: torch.bfloat16, Half.FLOAT16: torch.float16}
STEPS = 3


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def training(loss_of: Callable[[Any, Any], torch.Tensor], clip: float = 0.0) -> Callable[[Any], Step]:
    """SGD with momentum, so that a wrong gradient stays visible. clip: limits the norm of all gradients, if above 0."""

    def build(model: Any) -> Any:
        kept = [torch.zeros_like(parameter) for parameter in model.parameters()]

        def step(batch: Any) -> torch.Tensor:
            loss = loss_of(model, batch)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            with torch.no_grad():
                for parameter, momentum in zip(model.parameters(), kept, strict=True):
                    momentum.mul_(0.5).add_(parameter.grad)
                    parameter.sub_(momentum * 0.1)
            model.zero_grad()
            return loss.detach()

        names = [name for name, _ in model.named_parameters()]
        states = {f"state.momentum.{name}": functools.partial(kept.__getitem__, i) for i, name in enumerate(names)}
        return step, states

    return build


class Convolutional(nn.Module):
    """Batch norm in training: its statistics are sums over samples as well, and are no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.last = nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.norm(self.convolution(x))).mean((2, 3)))


class Codebook(nn.Module):
    """Beside a trained layer, a codebook that follows the mean of what comes, without a gradient."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("codes", torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        chosen = torch.softmax(made @ self.codes.clone().t(), -1)
        with torch.no_grad():
            self.codes.copy_(0.9 * self.codes + 0.1 * (chosen.t() @ made) / x.shape[0])
        return chosen.square().mean() + made.square().mean()


def next_words(model: Any, batch: Any) -> torch.Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.reshape(-1, WORDS), batch[1].reshape(-1))


def classes(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def images() -> Any:
    return torch.randn(BATCH, 2, 6, 6), torch.randint(4, (BATCH,))


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[], nn.Module], Callable[[], Any]]] = {
    "transformer": (training(next_words), Transformer, text),
    "clipped": (training(next_words, clip=0.5), Transformer, text),
    "images": (training(classes), Convolutional, images),
}


@functools.cache
def traced(case: str) -> Traced:
    torch.manual_seed(0)
    build, model, batch = CASES[case]
    return Traced(build, model(), batch(), double=False)


@functools.cache
def planned(case: str, precision: Precision, wafers: int, micro_batches: int) -> plan_pb2.Plan:
    """For two shards. Nothing changes it."""
    return traced(case).plan(wafers, 2, precision=precision, micro_batches=micro_batches)


def batches(case: str) -> list[Any]:
    return [tree_leaves(CASES[case][2]()) for _ in range(STEPS)]


def travelling(plan: plan_pb2.Plan) -> list[tuple[torch.dtype, torch.Size, bool]]:
    """Of all that is reduced: type, shape, and whether it goes to the shards alone."""
    return [
        (
            torch_dtype(member.type.element_type),
            torch.Size(member.type.shape),
            bool(group.shards) and not group.to_wafers and not group.to_coordinator,
        )
        for group in plan.wafer.groups
        if group.kind == REDUCTION
        for member in group.members
    ]


# -- what travels


@pytest.mark.parametrize(("wafers", "micro_batches"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_weights_travel_in_half_and_nothing_else(case: str, wafers: int, micro_batches: int) -> None:
    step = traced(case)
    plan = planned(case, BF16, wafers, micro_batches)
    # Batch norm's come back to the wafers, whose own gradients need them; one wafer updates its weights itself.
    own = "norm." if case == "images" else "-"
    named = step.reference.named_parameters()
    weights = sorted(tuple(p.shape) for name, p in named if not name.startswith(own))
    halves = sorted(tuple(shape) for dtype, shape, _ in travelling(plan) if dtype is torch.bfloat16)
    assert halves == weights
    assert all(to_shards for dtype, _, to_shards in travelling(plan) if dtype is torch.bfloat16)
    others = [shape for dtype, shape, _ in travelling(plan) if dtype is not torch.bfloat16]
    wide = planned(case, WIDE, wafers, micro_batches)
    assert len(others) == len(travelling(wide)) - len(weights)


def test_sums_that_are_no_gradients_stay_float32() -> None:
    """Of as many elements as a weight, and its next value is made of them."""
    step = Traced(training(lambda model, batch: model(batch)), Codebook(), torch.randn(BATCH, 8), double=False)
    found = travelling(step.plan(2, 1, precision=BF16))
    assert (torch.float32, torch.Size((4, 8)), True) in found
    assert (torch.bfloat16, torch.Size((8, 8)), True) in found


@pytest.mark.parametrize("wafers", [2, 4])
def test_half_as_many_bytes_are_sent_received_and_kept_for_links(wafers: int) -> None:
    build, width = training(lambda model, x: model(x).square().mean()), 256
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    step = Traced(build, model, torch.randn(BATCH, width), double=False)
    wide, half = (step.plan(wafers, 1, precision=p) for p in (WIDE, BF16))
    sent = [make_report(plan, "", MACHINE).totals.gradient_bytes for plan in (wide, half)]
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.01)
    assert half.wafer.arena.nbytes == pytest.approx(wide.wafer.arena.nbytes / 2, rel=0.01)
    assert half.swarmx.link_bytes < wide.swarmx.link_bytes
    assert half.memoryx[0].link_bytes < wide.memoryx[0].link_bytes
    slow = Rates(wafer=Compute(), memoryx=Compute(), swarmx_bytes_per_second=1e12, link_bytes_per_second=1e6)
    incoming = [
        next(load.share for load in found.loads if load.name == "MemoryX's link, in") * found.step_seconds
        for found in (predict(plan, wafers, 2, slow) for plan in (wide, half))
    ]
    assert incoming[1] == pytest.approx(incoming[0] / 2, rel=0.02)


def test_the_report_says_so() -> None:
    reports = [make_report(traced("images").plan(2, precision=p), "", MACHINE) for p in (WIDE, BF16)]
    assert [report.half_gradients for report in reports] == [False, True]
    assert ["gradients from a wafer, in half" in report_page(report) for report in reports] == [False, True]


def test_a_step_without_updates_is_as_it_was() -> None:
    step = Traced(lambda model: lambda batch: classes(model, batch), Convolutional().eval(), images(), double=False)
    wide, half = (step.plan(2, 1, precision=p) for p in (WIDE, BF16))
    half.precision.half_gradients = False
    assert half == wide


def test_plans_are_told_apart() -> None:
    keys = {artifact_key("module {}", Target(num_csx=2, num_shards=1, precision=p)) for p in (WIDE, BF16)}
    assert len(keys) == 2


# -- what is computed


def rounding(dtype: torch.dtype) -> Callable[[Any, plan_pb2.Group, list[Frame]], None]:
    """SwarmX, as a plan has it whose gradients are in float32, with what each role rounds where they are in half."""
    join = simulated_roles.SwarmX.join

    def joined(self: Any, group: plan_pb2.Group, parts: list[Frame]) -> None:
        to_shards = group.shards and not group.to_wafers and not group.to_coordinator
        if not to_shards or any(tensor.numel() == 1 for tensor in parts[0].tensors):
            join(self, group, parts)
            return
        sums = []
        for tensors in zip(*(part.tensors for part in parts), strict=True):
            total = tensors[0].to(dtype).float()
            for tensor in tensors[1:]:
                total = total + tensor.to(dtype).float()
            sums.append(total.to(dtype).to(tensors[0].dtype))
        for shard in group.shards:
            self.wires.send(self.name, f"shard{shard}", Frame.of(group, parts[0].step, sums, as_bytes=False))

    return joined


def rounding_alone(dtype: torch.dtype) -> Callable[[Any, plan_pb2.Group, int, list[torch.Tensor]], None]:
    """A single wafer, likewise: it sends its gradients to the shards itself."""
    send = simulated_roles.Wafer.send

    def sent(self: Any, group: plan_pb2.Group, step: int, tensors: list[torch.Tensor]) -> None:
        to_shards = group.shards and not group.to_wafers and not group.to_coordinator
        if self.num_wafers == 1 and to_shards and not any(tensor.numel() == 1 for tensor in tensors):
            tensors = [tensor.to(dtype).to(tensor.dtype) for tensor in tensors]
        send(self, group, step, tensors)

    return sent


@pytest.mark.parametrize(("wafers", "micro_batches"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize(
    ("case", "precision"),
    [("transformer", BF16), ("transformer", F16), ("clipped", BF16)],
    ids=lambda value: str(getattr(value, "half", value)),
)
def test_the_results_are_those_of_float32_rounded_once_by_each(
    monkeypatch: pytest.MonkeyPatch, case: str, precision: Precision, wafers: int, micro_batches: int
) -> None:
    """To the bit: losses, weights and all other states after some steps."""
    step, inputs = traced(case), batches(case)
    half = Simulation(planned(case, precision, wafers, micro_batches), step.initial)
    found = half.run(inputs, 1)
    wide = Simulation(planned(case, Precision(half=precision.half), wafers, micro_batches), step.initial)
    exact = Simulation(wide.plan, step.initial)
    exact.run(inputs, 1)
    monkeypatch.setattr(simulated_roles.SwarmX, "join", rounding(DTYPES[precision.half]))
    monkeypatch.setattr(simulated_roles.Wafer, "send", rounding_alone(DTYPES[precision.half]))
    expected = wide.run(inputs, 1)
    for output, wanted in zip(found, expected, strict=True):
        assert {name: value.item() for name, value in output.items()} == {n: v.item() for n, v in wanted.items()}
    for name, value in wide.states.items():
        assert torch.equal(half.states[name], value), name
    if wafers * micro_batches > 1:  # rounding is seen
        assert any(not torch.equal(half.states[name], value) for name, value in exact.states.items())


def test_micro_batches_in_rounds_are_added_in_float32_too() -> None:
    step, inputs = traced("transformer"), batches("transformer")
    whole = Simulation(step.plan(2, 1, precision=BF16, micro_batches=3), step.initial)
    with one_at_a_time():
        rounds = Simulation(step.plan(2, 1, precision=BF16, micro_batches=3), step.initial)
    assert rounds.plan.wafer.micro_batches_at_once == 1
    losses = [[float(*output.values()) for output in each.run(inputs, 1)] for each in (whole, rounds)]
    assert losses[0] == losses[1]
    assert all(torch.equal(whole.states[name], rounds.states[name]) for name in whole.states)


def test_orders_of_the_roles_change_nothing() -> None:
    step, inputs = traced("clipped"), batches("clipped")
    plan = planned("clipped", BF16, 4, 1)
    states = []
    for seed in range(6):
        simulation = Simulation(plan, step.initial)
        simulation.run(inputs, seed)
        states.append(simulation.states)
    assert all(torch.equal(states[0][name], other[name]) for other in states for name in other)


def plain_steps(
    weight: torch.Tensor, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]], wafers: int, dtype: torch.dtype
) -> torch.Tensor:
    """Regression with one product in plain PyTorch, part by part of the batch, as a cluster of wafers rounds it."""
    for x, target in inputs:
        parts = []
        for rows, wanted in zip(x.chunk(wafers), target.chunk(wafers), strict=True):
            error = (rows.to(dtype) @ weight.to(dtype).t()).float() - wanted
            gradient = (error * (2 / target.numel())).to(dtype)
            parts.append(gradient.t() @ rows.to(dtype))
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        weight = weight - total.to(dtype).float() * 0.1
    return weight


@pytest.mark.parametrize("wafers", [2, 4])
@pytest.mark.parametrize("case", AGAINST_AUTOCAST)
def test_errors_are_within_those_of_autocast(case: str, wafers: int) -> None:
    exact, autocast = (plain(case, dtype, 1.0) for dtype in (None, torch.bfloat16))
    ours = simulated(case, BF16, wafers, 1.0)
    (losses, weights), (allowed_losses, allowed_weights) = error(ours, exact), error(autocast, exact)
    assert 0 < losses <= BOUND * allowed_losses
    assert 0 < weights <= BOUND * allowed_weights


@pytest.mark.parametrize("wafers", [1, 2, 4])
@pytest.mark.parametrize("precision", [BF16, F16], ids=lambda precision: precision.half.value)
def test_the_results_are_plain_torchs_with_the_same_rounding(precision: Precision, wafers: int) -> None:
    def build(model: Any) -> Step:
        def step(batch: Any) -> torch.Tensor:
            loss = F.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            with torch.no_grad():
                model.weight.sub_(model.weight.grad * 0.1)
            model.zero_grad()
            return loss.detach()

        return step

    model = nn.Linear(16, 8, bias=False)
    inputs = [(torch.randn(BATCH, 16), torch.randn(BATCH, 8)) for _ in range(STEPS)]
    step = Traced(build, model, inputs[0], double=False)
    simulation = Simulation(step.plan(wafers, 1, precision=precision), step.initial)
    simulation.run(inputs, 1)
    expected = plain_steps(model.weight.detach(), inputs, wafers, DTYPES[precision.half])
    assert torch.equal(simulation.states["state.model.weight"], expected)


def test_a_sum_that_overflows_is_infinite_as_any_float16() -> None:
    """Parts that float16 has, of a sum that it has not: a loss scale has to see it."""

    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = (model(x) * 30000.0).sum()
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.where(torch.isfinite(norm), parameter - parameter.grad, parameter))
            model.zero_grad()
            return torch.isfinite(norm), loss.detach()

        return step

    model, x = nn.Linear(4, 4, bias=False), torch.ones(4, 4)
    step = Traced(build, model, x, double=False)
    wide, half = (Simulation(step.plan(4, 1, precision=p), step.initial) for p in (Precision(half=Half.FLOAT16), F16))
    finite = [bool(simulation.run([[x]], 1)[0]["output_0"]) for simulation in (wide, half)]
    assert finite == [True, False]
    assert torch.equal(half.states["state.model.weight"], model.weight.detach())
    assert not torch.equal(wide.states["state.model.weight"], model.weight.detach())


# -- what is refused


def test_cbfloat16_has_no_tensors_that_could_travel() -> None:
    with pytest.raises(CompileError, match=r"cbfloat16 is emulated .* leave cstorch.*half_gradients False, or use"):
        traced("images").plan(2, precision=Precision(half=Half.CBFLOAT16, half_gradients=True))


def test_nothing_travels_in_layer_pipelined_mode() -> None:
    with pytest.raises(CompileError, match=r"do not travel: leave cstorch.*half_gradients False, or use the execution"):
        traced("transformer").plan(1, precision=BF16, execution_strategy=ExecutionStrategy.PIPELINE)


def test_gradients_that_wait_for_others_are_kept_in_half() -> None:
    """A norm over all gradients makes updates wait: what a shard keeps meanwhile is what came."""
    build, width = training(lambda model, x: model(x).square().mean(), clip=1.0), 256
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    step = Traced(build, model, torch.randn(BATCH, width), double=False)
    wide, half = (step.plan(2, 1, precision=p) for p in (WIDE, BF16))
    kept = []
    for plan in (wide, half):
        groups = {group.id: group for group in plan.memoryx[0].groups}
        instructions = plan.memoryx[0].instructions
        kept.append(sum(groups[i.receive.group].nbytes for i in instructions if i.receive.keep))
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.01)
    for_one_norm = 4 * width**2
    expected = wide.memoryx[0].own_bytes - kept[1] + for_one_norm
    assert half.memoryx[0].own_bytes == pytest.approx(expected, rel=0.01)


def test_sums_that_wait_to_be_rounded_are_counted() -> None:
    """In rounds, the sums of all layers lie on the wafer from the first micro-batch to the last."""
    width, layers = 256, 4
    build = training(lambda model, x: model(x).square().mean())
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    step = Traced(build, model, torch.randn(BATCH, width), double=False)
    with one_at_a_time():
        plan = step.plan(1, 1, precision=BF16, micro_batches=3)
    assert sorted(tuple(joined.type.shape) for joined in plan.wafer.joined) == [(width, width)] * layers
    points = plan_memory(plan.wafer, profile_kernels(plan.wafer.kernels), 1 << 30).points
    runs = [i.run for i in plan.wafer.instructions if i.HasField("run")]
    sums = {joined.value for joined in plan.wafer.joined}
    middle = next(k for k, run in enumerate(runs) if run.micro_batch == 1 and not sums.isdisjoint(run.outputs))
    assert layers * width**2 * 4 <= points[middle].activation_bytes < (layers + 1) * width**2 * 4
    assert points[0].activation_bytes < width**2
