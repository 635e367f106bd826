"""Lazy initialisation against the same code on the CPU: every bit, and the generator afterwards."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from traced_steps import states_of, trace

from cstorch import backends
from cstorch._internal.tracing import DEVICE, alias_rule, cell_of, device_scope, purpose
from cstorch.backend import BackendType, Device
from cstorch.errors import TraceError

LARGE = 130  # squared, this many float32 are more than what stays in memory


@pytest.fixture(autouse=True)
def lazy() -> Iterator[None]:
    yield
    alias_rule.refuses_explicit = False


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """What `make` makes on the CPU and on the device, from the same seed; the generators must end alike."""
    torch.manual_seed(7)
    ours_before = torch.get_rng_state()
    theirs = make()
    expected = torch.get_rng_state()
    torch.set_rng_state(ours_before)
    with device_scope():
        ours = make()
    assert torch.equal(torch.get_rng_state(), expected)
    return ours, theirs


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    found = ours.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].cpu(), value), name


def deferred(module: nn.Module) -> set[str]:
    """The names of the tensors of which it is known how to make them."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name for name, tensor in tensors.items() if cell_of(tensor).initialisation is not None}


class Init(nn.Module):
    """Two tensors, initialised as a function says."""

    def __init__(self, first: Callable[..., Any], second: Callable[..., Any]) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(LARGE, 2 * LARGE))
        self.w2 = nn.Parameter(torch.empty(2 * LARGE, LARGE))
        first(self.w1)
        second(self.w2)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(200, 301),
    "linear in bfloat16": lambda: nn.Linear(256, 256, dtype=torch.bfloat16),
    "embedding": lambda: nn.Embedding(1000, 33, padding_idx=3),
    "layer norm": lambda: nn.LayerNorm([150, 130]),
    "convolution": lambda: nn.Conv2d(40, 64, 5),
    "batch norm": lambda: nn.BatchNorm2d(20000),
    "attention": lambda: nn.MultiheadAttention(132, 4),
    "lstm": lambda: nn.LSTM(130, 70, 2),
    "transformer": lambda: nn.TransformerEncoderLayer(132, 4, 300),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_as_on_the_cpu(name: str) -> None:
    ours, theirs = both(MODULES[name])
    assert deferred(ours)
    assert_same(ours, theirs)


INITIALISERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform": lambda w: nn.init.uniform_(w, -2, 3),
    "normal": lambda w: nn.init.normal_(w, 1, 0.02),
    "truncated": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "truncated often": lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.03, b=0.04),
    "truncated, own generator": lambda w: nn.init.trunc_normal_(w, generator=torch.Generator().manual_seed(3)),
    "constant": lambda w: nn.init.constant_(w, 0.25),
    "eye": nn.init.eye_,
    "xavier": nn.init.xavier_normal_,
    "kaiming": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "scaled": lambda w: w.data.normal_().mul_(0.5).add_(1).clamp_(-1, 2),
    "rows": lambda w: (w.data.uniform_(), w.data[3].zero_(), w.data[:, 5:9].fill_(2.0)),
    "another": lambda w: w.data.copy_(torch.randn(*w.shape, device=w.device).t().contiguous().t() * 3),
    "half": lambda w: w.data.copy_(torch.rand(w.shape, device=w.device).to(torch.bfloat16)),
    "tril": lambda w: w.data.copy_(torch.tril(torch.ones(*w.shape, device=w.device))),
    "joined": lambda w: w.data.copy_(torch.cat([torch.randn(1, w.shape[1]), torch.rand(w.shape[0] - 1, w.shape[1])])),
    "by values": lambda w: w.data.normal_().div_(w.data.normal_().norm().item()),
    "own generator": lambda w: w.data.normal_(generator=torch.Generator().manual_seed(3)),
    "twice": lambda w: nn.init.kaiming_normal_(nn.init.uniform_(w)),
}


@pytest.mark.parametrize("name", INITIALISERS)
@torch.no_grad()
def test_initialisers_as_on_the_cpu(name: str) -> None:
    ours, theirs = both(lambda: Init(INITIALISERS[name], INITIALISERS[name]))
    assert_same(ours, theirs)


def test_what_is_not_deferred_is_made_at_once() -> None:
    ours, theirs = both(lambda: Init(lambda w: w.data.bernoulli_(0.3), nn.init.orthogonal_))
    assert not deferred(ours)
    assert_same(ours, theirs)


def seed_004() -> nn.Module:
    """Both weights are initialised twice, in an order that grouping by weight changes."""
    model = Init(lambda w: w.data.uniform_(-1, 1), lambda w: w.data.normal_())

    def init_weights(module: nn.Module) -> None:
        assert isinstance(module, Init)
        nn.init.kaiming_uniform_(module.w1)
        nn.init.kaiming_normal_(module.w2)

    return model.apply(init_weights)


def test_the_order_of_initialisation_changes_nothing() -> None:
    ours, theirs = both(seed_004)
    assert deferred(ours) == {"w1", "w2"}
    assert torch.equal(ours.w2.cpu(), theirs.w2)  # in the other order
    assert torch.equal(ours.w1.cpu(), theirs.w1)


def test_eager_initialisation_has_bytes() -> None:
    backends.csx.debug.lazy_initialization = False
    ours, theirs = both(seed_004)
    assert not deferred(ours)
    assert_same(ours, theirs)


def test_a_fill_is_deferred_without_lazy_initialisation_too() -> None:
    backends.csx.debug.lazy_initialization = False
    for make in (torch.zeros, torch.ones, lambda n, device: torch.full((n,), 0.1, device=device)):
        tensor = make(LARGE**2, device=DEVICE)
        assert cell_of(tensor).initialisation is not None
        assert torch.equal(tensor.cpu(), make(LARGE**2, device="cpu"))


def test_a_later_change_does_not_reach_who_read_before() -> None:
    def make() -> tuple[torch.Tensor, ...]:
        first = torch.randn(LARGE, LARGE)
        second = first * 2
        first.add_(1)
        third = first.clone()
        first.normal_()
        return first, second, third

    (ours, theirs) = both(make)
    for one, other in zip(reversed(ours), reversed(theirs), strict=True):
        assert cell_of(one).initialisation is not None
        assert torch.equal(one.cpu(), other)


def test_copies_and_loads() -> None:
    ours, theirs = both(lambda: nn.Linear(LARGE, LARGE))
    twin = copy.deepcopy(ours)
    assert deferred(twin) == {"weight"}
    loaded = nn.Linear(LARGE, LARGE)
    ours.load_state_dict(loaded.state_dict())
    assert_same(ours, loaded)
    assert_same(twin, theirs)


def test_tied_weights_are_one() -> None:
    def make() -> nn.Module:
        embedding, linear = nn.Embedding(300, 80), nn.Linear(80, 300, bias=False)
        linear.weight = embedding.weight
        nn.init.normal_(embedding.weight, std=0.02)
        return nn.Sequential(embedding, linear)

    ours, theirs = both(make)
    assert cell_of(ours[0].weight) is cell_of(ours[1].weight)
    assert_same(ours, theirs)


def test_an_overlap_is_refused_at_once() -> None:
    tensor = torch.ones(LARGE, LARGE, device=DEVICE)
    wrongs: list[Callable[[], torch.Tensor]] = [
        lambda: tensor.copy_(tensor.t()),
        lambda: tensor[:1].expand(LARGE, LARGE).mul_(2),
    ]
    for wrong in wrongs:
        with pytest.raises(RuntimeError, match="single memory location"):
            wrong()


def test_reading_leaves_the_way_to_make_it() -> None:
    def make() -> nn.Module:
        model = nn.Linear(LARGE, LARGE)
        assert model.weight.max() > 0
        return model

    ours, theirs = both(make)
    assert deferred(ours) == {"weight"}
    assert_same(ours, theirs)
    assert cell_of(ours.weight).is_made
    with torch.no_grad():
        ours.weight[0].mul_(2)
        theirs.weight[0].mul_(2)
    assert not deferred(ours)
    assert_same(ours, theirs)


SHAPES = [(129, 130), (1025, 1025), (3, (1 << 20) + 5), (1 << 20,), (2 * (1 << 20) + 15,)]
BOUNDS = [(-0.5, 1.25), (-0.01, 3.0), (0.9, 1.0)]
# Each shape with all bounds, and the types in turn: so each type is with each shape, and with each of the bounds.
TRUNCATED = [
    (shape, (torch.float32, torch.bfloat16)[(row + column) % 2], bounds)
    for row, shape in enumerate(SHAPES)
    for column, bounds in enumerate(BOUNDS)
]


@pytest.mark.parametrize(("shape", "dtype", "bounds"), TRUNCATED)
def test_truncated_numbers_are_deferred(
    shape: tuple[int, ...], dtype: torch.dtype, bounds: tuple[float, float]
) -> None:
    """Also between bounds with too few normal numbers, where torch draws other ones, at once."""

    def make() -> torch.Tensor:
        return nn.init.trunc_normal_(torch.empty(shape, dtype=dtype), 0.25, 1.0, *bounds)

    ours, theirs = both(make)
    is_regular = dtype is torch.float32 or theirs.numel() % 16 == 0
    assert (cell_of(ours).initialisation is not None) == (is_regular and bounds[0] < 0)
    assert torch.equal(ours.cpu(), theirs)


def test_truncated_numbers_are_not_drawn_for_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purpose, "runs_steps", False)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with device_scope():
        made = nn.init.trunc_normal_(torch.empty(LARGE, LARGE), 0.0, 1.0, -1.0, 1.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not cell_of(made).is_made
    torch.manual_seed(7)
    assert torch.equal(made.cpu(), nn.init.trunc_normal_(torch.empty(LARGE, LARGE), 0.0, 1.0, -1.0, 1.0))


def test_writes_are_counted() -> None:
    tensor = torch.zeros(LARGE**2, device=DEVICE)
    cell = cell_of(tensor)
    before = cell.version
    tensor.normal_()
    assert cell.version == before + 1
    tensor[3:9].zero_()
    assert cell.version == before + 2
    tensor.cpu()
    assert cell.version == before + 2


def test_a_default_type_of_the_script_is_kept() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        ours, theirs = both(lambda: torch.ones(LARGE, LARGE) / 3 + torch.arange(LARGE) / 7)
    finally:
        torch.set_default_dtype(torch.float32)
    assert ours.dtype is theirs.dtype is torch.float64
    assert torch.equal(ours.cpu(), theirs)


class Transposing(nn.Module):
    """Seed 004's model, with a weight that is large enough to be deferred."""

    def __init__(self, explicit: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(LARGE, LARGE)
        self.explicit = explicit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.explicit:
            return x @ self.fc1.weight.T + self.fc1.bias
        return nn.functional.linear(x, self.fc1.weight, self.fc1.bias)


def trace_forward(model: nn.Module) -> Any:
    return trace(model, torch.ones(2, LARGE), states_of(model=model), model)


def test_an_explicit_alias_names_its_line_and_a_way_out() -> None:
    Device(BackendType.CSX).config.lazy_initialization = True
    with device_scope():
        wrong, right = Transposing(explicit=True), Transposing(explicit=False)
    with pytest.raises(TraceError, match=r"test_lazy_initialisation.py:\d+ `aten::\w+` makes.*F\.linear\(x, weight\)"):
        trace_forward(wrong)
    trace_forward(right)


def test_without_the_older_spelling_aliases_are_traced() -> None:
    device = Device(BackendType.CSX)
    assert device.config.lazy_initialization
    backends.csx.debug.lazy_initialization = True
    with device_scope():
        model = Transposing(explicit=True)
    assert deferred(model) == {"fc1.weight"}
    trace_forward(model)
    device.config.lazy_initialization = False
    assert not backends.csx.debug.lazy_initialization
    backends.reset()
    assert device.config.lazy_initialization


STEPS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda a, b: a.normal_(),
    lambda a, b: a.uniform_(-1, 2),
    lambda a, b: a[1:, 2:].fill_(0.5),
    lambda a, b: a[5:7].uniform_(),
    lambda a, b: a.t()[3:50, 20].normal_(),
    lambda a, b: a.view(-1)[17:60].normal_(),
    lambda a, b: a.mul_(1.5).clamp_(-1, 1),
    lambda a, b: a.erfinv_(),
    lambda a, b: a.add_(b, alpha=0.5),
    lambda a, b: a.copy_(b.t()),
    lambda a, b: a.copy_(a.t() * 2),
    lambda a, b: a.mul_(a),
    lambda a, b: a.copy_(torch.tril(b) + a.cos()),
    lambda a, b: a[2].copy_(b[:, 3]),
    lambda a, b: a.zero_(),
    lambda a, b: a.data.cpu(),
    lambda a, b: a.div_(torch.rand(a.shape[1], device=a.device) + 1),
    lambda a, b: a.bernoulli_(0.5),
    lambda a, b: a.copy_(torch.stack([b[i] for i in range(len(b))])),
]


@settings(max_examples=40, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(range(len(STEPS))), st.booleans()), max_size=12))
def test_any_initialisation_as_on_the_cpu(steps: list[tuple[int, bool]]) -> None:
    def make() -> tuple[torch.Tensor, torch.Tensor]:
        pair = (torch.ones(LARGE, LARGE), torch.zeros(LARGE, LARGE))
        for step, swap in steps:
            STEPS[step](*(pair[::-1] if swap else pair))
        return pair

    ours, theirs = both(make)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.cpu().view(torch.int32), other.view(torch.int32))
