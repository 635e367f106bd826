"""Later calls of the traced function: what Python would do otherwise is found, with its line and value."""

import functools
import importlib
import itertools
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cluster import FakeCluster, StartCluster
from torch import nn
from torch.nn import functional as F
from user_script import Script, step_of_cluster

import cstorch
from cstorch._internal.session.execution import program_check
from cstorch._internal.tracing import LazyTensor
from cstorch.errors import TraceError
from cstorch.utils.data import DataLoader

counter = 0


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    return start_cluster(step_of_cluster)


class Net(nn.Module):
    """A model whose forward pass a test gives."""

    def __init__(self, forward: Callable[["Net", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.own = forward
        self.count = 0
        self.temperature = 1.0
        self.hidden: Any = None
        self.seen: list[Any] = []
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self, x)


class Planted(Script):
    """A script whose model does what a test says, and whose step can be replaced."""

    model: Net  # type: ignore[assignment]  # in place of the layer

    def __init__(
        self, folder: Path, cluster: FakeCluster, forward: Callable[[Net, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__(folder, cluster)
        self.model = Net(forward)
        self.net = cstorch.compile(self.model)
        self.optimizer = cstorch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train(self, batch: Any) -> torch.Tensor:
        loss = self.net(batch).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def plain(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x)


# Faults: each a forward pass, what it says of the Python value, and the text of the line that it names.


def counted(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    return net.linear(x) * net.count  # here


def cooled(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.temperature *= 0.5
    return net.linear(x) / net.temperature  # here


def one_of_two(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    y = net.linear(x)
    if net.count < 3:
        return y
    return y.tanh()  # here


def after_hundred(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    y = net.linear(x)
    if net.count <= 100:
        return y
    return y.tanh()  # here


def every_fifth(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    y = net.linear(x)
    if net.count % 5 == 0:
        y = y.relu()  # here
    return y


def python_random(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * random.random()  # here


def numpy_random(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) + float(np.random.rand())  # here


def numpy_tensor(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) + torch.tensor(np.random.rand(2).astype("float32")).to(x.device)  # here


def torch_number(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * torch.rand(()).item()  # here


def drawn_decision(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    return y.tanh() if net.count + round(random.random() * 1e6) % 2 else y.relu()  # here


def growing_list(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.seen.append(1)
    return net.linear(x) / len(net.seen)  # here


def carried(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    if net.hidden is not None:
        y = y + net.hidden  # here
    net.hidden = y.detach()
    return y


def of_a_global(net: Net, x: torch.Tensor) -> torch.Tensor:
    global counter
    counter += 1
    return net.linear(x) * counter  # here


class Settings:
    calls = 0
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


settings = Settings()


def of_a_slot(net: Net, x: torch.Tensor) -> torch.Tensor:
    settings.rate += 1
    return net.linear(x) * settings.rate  # here


def of_a_class(net: Net, x: torch.Tensor) -> torch.Tensor:
    Settings.calls += 1
    return net.linear(x) * Settings.calls  # here


counts: dict[str, int] = {"calls": 0}


def of_a_dict(net: Net, x: torch.Tensor) -> torch.Tensor:
    counts["calls"] += 1
    return net.linear(x) * counts["calls"]  # here


def of_a_default(net: Net, x: torch.Tensor, memory: list[int] = []) -> torch.Tensor:  # noqa: B006 - that is the fault
    memory.append(1)
    return net.linear(x) * len(memory)  # here


factors = itertools.cycle([1.0, 0.5])


def of_a_cycle(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * next(factors)  # here


finite = iter([1.0, 1.0])


def used_up(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * next(finite)  # here


def unfreezing(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    net.frozen.requires_grad_(net.count > 1)
    return net.frozen(net.linear(x))  # here


def constant_of_count(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    return net.linear(x)[:, : net.count]  # here


FAULTS: dict[Callable[[Net, torch.Tensor], torch.Tensor], str] = {
    counted: r"model\.count was 0 and is 1",
    cooled: r"\.temperature was 1.0 and is 0.5",
    one_of_two: r"\.count was 0 and is 2",
    after_hundred: r"\.count was 0 and is",
    every_fifth: r"\.count was 0 and is",
    python_random: r"draws random numbers from `random`",
    numpy_random: r"draws random numbers from `numpy.random`",
    numpy_tensor: r"draws random numbers from `numpy.random`",
    torch_number: r"draws random numbers from `torch` on the CPU",
    growing_list: r"\.seen was of 0 elements and is of 1 elements",
    carried: r"was computed in another one",
    of_a_global: r"counter was \d+ and is \d+",
    of_a_slot: r"settings.rate was",
    of_a_class: r"Settings.calls was \d+ and is \d+",
    of_a_dict: r"counts\['calls'\] was \d+ and is \d+",
    of_a_default: r"default 0 of .*of 0 elements and is of 1",
    of_a_cycle: r"an iterator may be the cause",
    used_up: r"(an iterator with 2 left and is an iterator with 1 left|StopIteration)",
    unfreezing: r"\.count was 0 and is 1",
    constant_of_count: r"\.count was 0 and is 1",
}


def _line(function: Callable[..., Any]) -> str:
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return f"test_later_calls.py:{next(n for n in range(first, first + 20) if '# here' in lines[n - 1])} "


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_with_its_line_and_value(
    cluster: FakeCluster, tmp_path: Path, fault: Callable[[Net, torch.Tensor], torch.Tensor]
) -> None:
    script = Planted(tmp_path, cluster, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script.loop(script.step, num_steps=300 if fault is after_hundred else 6)
    (message,) = [str(item.message) for item in caught if "traced once" in str(item.message)]
    assert _line(fault) in message
    assert re.search(FAULTS[fault], message), message


def test_a_branch_that_is_drawn_seldom_is_found_after_a_first_call_of_any_length(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    draws = random.Random(34)  # below 0.1 first at the tenth
    assert [draws.random() < 0.1 for _ in range(10)].index(True) == 9, "another generator"

    def seldom(net: Net, x: torch.Tensor) -> torch.Tensor:
        if net.count == 0:
            time.sleep(1.6)  # as long as a first import: three of these are too long
        net.count = 1
        y = net.linear(x)
        return y.tanh() if random.random() < 0.1 else y

    random.seed(34)
    script = Planted(tmp_path, cluster, seldom)
    with pytest.warns(UserWarning, match="call 10 of the step"):
        script.loop(script.step, num_steps=12)


# Steps that are right, whatever Python does in them.


def mask_made_once(net: Net, x: torch.Tensor) -> torch.Tensor:
    if net.hidden is None:
        net.hidden = torch.ones(2, 2, device=x.device).triu(1) == 0
    return net.linear(x) @ net.hidden.to(x.dtype)


def table_of_a_buffer(net: Net, x: torch.Tensor) -> torch.Tensor:
    if net.hidden is None:
        angles = torch.arange(4, device=x.device)[:, None] * net.table
        net.hidden = angles.cos(), angles.sin()
    return net.linear(x) * net.hidden[0] + net.hidden[1]


def zeros_like_made_once(net: Net, x: torch.Tensor) -> torch.Tensor:
    if net.hidden is None:
        net.hidden = torch.zeros_like(x) + 1
    return net.linear(x) * net.hidden


def buffer_made_late(net: Net, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(net, "late"):
        net.register_buffer("late", torch.arange(2, device=x.device) * 2.0, persistent=False)
    return net.linear(x) * net.late


def mask_of_the_cpu(net: Net, x: torch.Tensor) -> torch.Tensor:
    if net.hidden is None:
        net.hidden = torch.ones(2, 2).triu()
    return net.linear(x) @ net.hidden.to(x.device)


def large_mask_of_the_cpu(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) + torch.ones(50, 50).triu().to(x.device)[:4, :2]


def logged_count(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    if net.count % 100 == 0:
        net.seen.append(net.count)
    return net.linear(x)


def kept_loss(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    net.seen.append(y.detach())
    net.hidden = y
    return y


def unused_draw(net: Net, x: torch.Tensor) -> torch.Tensor:
    if torch.rand([]) < 0.0 or random.random() < 0 or np.random.rand() < 0:  # layers left out with a chance of 0
        return x
    return net.linear(x)


def unused_count(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    _ = x.sum() * net.count
    return net.linear(x)


def dropped(net: Net, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(net.linear(x)) + torch.randn(2, device=x.device)


def registered_count(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.table.add_(1)
    return torch.where(net.table > 3, net.linear(x), x)


def replaced_buffer(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.table = net.table * 0.9 + x[0] * 0.1
    return net.linear(x) * net.table


def sets_its_mode(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.eval()
    y = net.linear(x)
    net.train()
    return y


def timed(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += round(np.random.rand() * 1000)
    net.seen.append({"time": random.random()})
    return net.linear(x)


@functools.lru_cache(maxsize=8)
def cached_positions(length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length, device=device)


def lru_cache(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * cached_positions(2, x.device)


def module_made_once(net: Net, x: torch.Tensor) -> torch.Tensor:
    if net.hidden is None:
        net.hidden = nn.LogSoftmax(-1)
    return net.hidden(net.linear(x))


def closures_in_the_step(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    cstorch.step_closure(lambda value: net.seen.append(1))(y.mean())
    return y


RIGHT = [
    plain,
    mask_made_once,
    table_of_a_buffer,
    zeros_like_made_once,
    buffer_made_late,
    mask_of_the_cpu,
    large_mask_of_the_cpu,
    logged_count,
    kept_loss,
    unused_draw,
    unused_count,
    dropped,
    registered_count,
    replaced_buffer,
    sets_its_mode,
    timed,
    lru_cache,
    module_made_once,
    closures_in_the_step,
]


@pytest.mark.parametrize("forward", RIGHT, ids=lambda forward: forward.__name__)
def test_what_is_right_is_silent(
    cluster: FakeCluster, tmp_path: Path, forward: Callable[[Net, torch.Tensor], torch.Tensor]
) -> None:
    script = Planted(tmp_path, cluster, forward)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # the second execution meets what the first has left
            script.loop(script.step, num_steps=3)


# What the loop changes.


def run_with(script: Planted, change: Callable[[Planted, int], None], num_steps: int) -> None:
    """Runs a loop that makes the change of each step before the step."""
    steps = itertools.count()

    def body(batch: Any) -> None:
        change(script, next(steps))
        script.step(batch)

    script.loop(body, num_steps=num_steps)


def warning_of(script: Planted, change: Callable[[Planted, int], None], num_steps: int) -> str:
    """The only warning of such a loop."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_with(script, change, num_steps)
    (message,) = [str(item.message) for item in caught]
    return message


def lower_rate(script: Planted, step: int) -> None:
    for group in script.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + step)


def unfreeze(script: Planted, step: int) -> None:
    script.model.frozen.requires_grad_(step >= 3)


def evaluate(script: Planted, step: int) -> None:
    script.model.train(step < 3)


def frozen_beside(net: Net, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(net.frozen(net.linear(x)), training=net.training)


LOOPS: dict[Callable[[Planted, int], None], str] = {
    lower_rate: r"call 2 .*SGD.param_groups\[0\]\['lr'\] was 0.1 and is 0.05",
    unfreeze: r"call 4 .*model.frozen.weight.requires_grad was False and is True",
    evaluate: r"call 4 .*model.training was True and is False",
}


@pytest.mark.parametrize("change", LOOPS, ids=lambda change: change.__name__)
def test_what_the_loop_changes_is_said_once(
    cluster: FakeCluster, tmp_path: Path, change: Callable[[Planted, int], None]
) -> None:
    message = warning_of(Planted(tmp_path, cluster, frozen_beside), change, num_steps=6)
    assert re.search(LOOPS[change], message), message
    assert "test_later_calls.py:" in message


def set_later(script: Planted, step: int) -> None:
    if step == 3:
        script.model.temperature = 2.0


def set_at_last(script: Planted, step: int) -> None:
    if step == 39:
        settings.rate = 0.5


def set_in_a_dictionary(script: Planted, step: int) -> None:
    counts["late"] = step // 25


def warm(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) / net.temperature


def rated(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * settings.rate


def late(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    return y.tanh() if counts.get("late") else y


LATE: dict[Callable[[Planted, int], None], tuple[Callable[[Net, torch.Tensor], torch.Tensor], str]] = {
    set_later: (warm, r"call 4 of the step .*temperature was 1.0 and is 2.0"),
    set_at_last: (rated, r"call 40 of the step .*rate was .* and is 0.5"),
    set_in_a_dictionary: (late, r"call 32 of the step .*counts\['late'\] was 0 and is 1"),
}


@pytest.mark.parametrize("change", LATE, ids=lambda change: change.__name__)
def test_what_the_loop_sets_later_is_found(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Planted, int], None]
) -> None:
    """Also in a second execution of the program, whose second call is not traced."""
    monkeypatch.setattr(settings, "rate", 1.0)
    monkeypatch.setitem(counts, "late", 0)
    script = Planted(tmp_path, cluster, LATE[change][0])
    script.loop(script.step, num_steps=3)
    message = warning_of(script, change, num_steps=40)
    assert re.search(LATE[change][1], message), message


@pytest.mark.parametrize(("seconds", "again"), [(0.2, 2), (1.1, 1)])
def test_values_that_grow_without_effect_do_not_slow_the_loop_down(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, again: int
) -> None:
    """They are a reason to trace the step again when they are first seen to change, and in the last call."""
    script = Planted(tmp_path, cluster, plain)
    traced: list[int] = []

    def findings(*traces: Any) -> list[Any]:
        traced.append(script.model.count)
        return []

    monkeypatch.setattr(program_check, "findings", findings)
    original = program_check.ProgramCheck.traced

    def slow(self: program_check.ProgramCheck, trace: Any, _: float) -> None:
        original(self, trace, seconds)

    monkeypatch.setattr(program_check.ProgramCheck, "traced", slow)

    def body(batch: Any) -> None:
        script.model.count += 1
        script.model.seen.append(script.model.count)
        script.step(batch)

    script.loop(body, num_steps=100)
    assert traced == [2, 4, 100][: 1 + again]
    traced.clear()
    script.loop(body, num_steps=100)  # what the session knows
    assert traced == []


def unused_setting(script: Planted, step: int) -> None:
    script.optimizer.param_groups[0]["note"] = step


def same_rate(script: Planted, step: int) -> None:
    script.optimizer.param_groups[0]["lr"] = 0.1


def mode_without_effect(script: Planted, step: int) -> None:
    script.model.train(step % 2 == 0)


@pytest.mark.parametrize("change", [unused_setting, same_rate, mode_without_effect])
def test_changes_that_do_not_matter_are_silent(
    cluster: FakeCluster, tmp_path: Path, change: Callable[[Planted, int], None]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_with(Planted(tmp_path, cluster, plain), change, num_steps=12)


def test_schedules_and_scalers_are_silent(cluster: FakeCluster, tmp_path: Path) -> None:
    script = Planted(tmp_path, cluster, plain)
    schedule = cstorch.optim.lr_scheduler.LinearLR(script.optimizer, 0.1, 0.01, 10)
    scaler = cstorch.amp.GradScaler(loss_scale="dynamic")

    @cstorch.trace
    def step(batch: Any) -> torch.Tensor:
        loss = script.net(batch).mean()
        script.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(script.optimizer)
        scaler.update()
        schedule.step()
        return loss

    cluster.step = lambda state, step: {"output_values_0": torch.tensor(1.0), "output_value": torch.tensor(0.1)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.loop(step, num_steps=4)


def test_with_waferbox_strict_a_finding_is_an_error(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAFERBOX_STRICT", "1")
    script = Planted(tmp_path, cluster, counted)
    with pytest.raises(TraceError, match=r"model.count was 0 and is 1.*`self.count.add_\(1\)`"):
        script.loop(script.step, num_steps=2)
    assert script.model.count == 1


class Touchy:
    """An object all of whose own code fails."""

    inside = 0

    def _fail(self, *args: Any) -> Any:
        raise AssertionError("code of the script was called")

    __eq__ = __hash__ = __len__ = __iter__ = __bool__ = __repr__ = __contains__ = __getattr__ = _fail
    value = property(_fail)


class TouchyList(list[int]):
    __len__ = __iter__ = __eq__ = __getitem__ = Touchy._fail


class TouchyProxy:
    __class__ = property(Touchy._fail)


touchy = Touchy(), TouchyList([1]), TouchyProxy()


def beside_touchy_objects(net: Net, x: torch.Tensor) -> torch.Tensor:
    if touchy is None:
        return x
    net.count += 1
    return net.linear(x)


def test_no_code_of_the_script_is_called_to_look_at_its_objects(cluster: FakeCluster, tmp_path: Path) -> None:
    script = Planted(tmp_path, cluster, beside_touchy_objects)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.loop(script.step, num_steps=3)


class Getter(property):
    """An object with a member of a class of C, which can only be read."""

    function = property.fget


def beside_a_member_of_c(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.hidden = net.hidden or Getter(plain)  # type: ignore[arg-type]
    return net.linear(x)


def test_members_of_classes_of_c_are_not_written(cluster: FakeCluster, tmp_path: Path) -> None:
    script = Planted(tmp_path, cluster, beside_a_member_of_c)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.loop(script.step, num_steps=3)


TICKS = """\
class Ticker:
    def __init__(self):
        self.count = 0

    def tick(self):
        self.count += 1
        return self.count
"""


@pytest.mark.parametrize("is_package", [False, True])
@pytest.mark.parametrize("end", ["", os.sep])
def test_a_package_is_known_by_the_folder_that_it_is_installed_in(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_package: bool, end: str
) -> None:
    """A package's own counters are its own affair, wherever it is installed; those of the script's files are named."""
    folder = tmp_path / "elsewhere"
    (folder / "ticks-1.0.dist-info" if is_package else folder).mkdir(parents=True)
    (folder / "ticks.py").write_text(TICKS)
    # Some scripts add a Path, which Python's import ignores.
    monkeypatch.setattr(sys, "path", [folder, f"{folder}{end}", *sys.path])
    monkeypatch.delitem(sys.modules, "ticks", raising=False)
    ticker = importlib.import_module("ticks").Ticker()

    def ticking(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.linear(x) * ticker.tick()

    script = Planted(tmp_path, cluster, ticking)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script.loop(script.step, num_steps=3)
    (message,) = [str(item.message) for item in caught if "traced once" in str(item.message)]
    assert ("ticker.count was" in message) is not is_package, message


# That the check leaves no trace.


def all_that_python_has(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    net.seen.append(net.count)
    net.hidden = {"count": net.count, "loss": net.linear(x).mean()}
    counts["calls"] += 1
    settings.rate *= 2
    net.own = all_that_python_has
    net.table = net.table + 1
    net.frozen.requires_grad_(net.count > 1)
    torch.manual_seed(net.count)
    random.random()
    np.random.rand()
    torch.rand(3)
    return net.linear(x) * net.table


def test_nothing_of_the_script_changes_by_the_check(cluster: FakeCluster, tmp_path: Path) -> None:
    script = Planted(tmp_path, cluster, all_that_python_has)
    held: list[Any] = []

    def body(batch: Any) -> None:
        script.step(batch)
        net = script.model
        assert isinstance(net.table, LazyTensor)
        cell = net.table._handle.cell
        grads = [parameter.grad for parameter in net.parameters()]
        hidden = net.hidden["loss"]
        state_of_numpy: Any = np.random.get_state()
        generators = random.getstate(), state_of_numpy[1].tolist(), torch.get_rng_state().tolist()
        flags = net.frozen.weight.requires_grad
        version = None if cell is None else cell.version
        group = dict(script.optimizer.param_groups[0])
        held.append((net.count, [*net.seen], hidden, dict(counts), settings.rate, id(cell), flags, version, group))
        held[-1] += (*generators, grads)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script.loop(body, num_steps=2)
    first, second = held
    for a, b in zip(first, second, strict=True):
        assert a is b or a == b


def test_the_program_that_runs_is_that_of_the_first_call(cluster: FakeCluster, tmp_path: Path) -> None:
    """What a tensor that only the second call made stands for is known, as the script may have kept it anywhere."""
    script = Planted(tmp_path, cluster, plain)
    out: list[Any] = []
    cell: Any = np.empty(1, dtype=object)  # in an array nothing is put back

    @cstorch.trace
    def step(batch: Any) -> torch.Tensor:
        cell[0] = script.train(batch)
        return cell[0]

    @cstorch.step_closure
    def note(loss: torch.Tensor) -> None:
        out.append(float(loss))

    def body(batch: Any) -> None:
        step(batch)
        note(cell[0])

    script.loop(body, num_steps=3)
    assert out == [1.0, 2.0, 3.0]
    assert len(cluster.compiled) == 1


def test_the_check_is_made_once_for_a_function_and_a_program(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Planted(tmp_path, cluster, plain)
    compared: list[Any] = []

    def findings(*traces: Any) -> list[Any]:
        compared.append(traces)
        return []

    monkeypatch.setattr(program_check, "findings", findings)
    for _ in range(3):
        script.loop(script.step, num_steps=4)
    assert len(compared) == 1
    script.model.own = dropped
    script.loop(script.step, num_steps=4)
    assert len(compared) == 2


def test_an_expensive_trace_is_not_repeated(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(program_check, "LEAST_SECONDS", 0.0)
    cluster.step_seconds = 1e-6
    script = Planted(tmp_path, cluster, counted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.loop(script.step, num_steps=3)
    assert "is not called again to see whether it does the same: tracing it takes" in caplog.text


def test_an_expensive_trace_waits_for_the_time_of_a_step(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_check, "LEAST_SECONDS", 0.0)
    cluster.step_seconds = 60.0
    script = Planted(tmp_path, cluster, counted)
    with pytest.warns(UserWarning, match="call 5 of the step"):
        script.loop(script.step, num_steps=8, activation_steps=4)


# --- Strings and other objects in the batches -------------------------------------------------------------------------

OBJECTS: dict[str, tuple[Any, Any]] = {
    "string": ("even", "odd"),
    "strings": (["even", "x"], ["odd", "x"]),
    "bytes": (b"even", b"odd"),
    "none": ("even", None),
    "set": (frozenset({0}), frozenset({1})),
    "dtype": (torch.float32, torch.float64),
    "slice": (slice(0, 3), slice(0, 6)),
    "array": (np.array(["even", "x"]), np.array(["odd", "x"])),
}


def _batches(first: Any, later: Any, changes_at: int) -> list[Any]:
    """Four batches whose objects change with this one."""
    return [
        {"x": torch.ones(4, 2), "kind": first if number < changes_at else later, "file": f"{number}.png"}
        for number in range(1, 5)
    ]


def _key(kind: Any) -> str:
    return str(kind)


def _objects_are_used(cluster: FakeCluster, folder: Path, batches: list[Any], by_parts: bool) -> list[str]:
    """Trains with a factor that depends on the objects. Returns the warnings."""
    script = Planted(folder, cluster, plain)
    factors = {_key(batches[0]["kind"]): 3.0}

    @cstorch.trace
    def step(x: torch.Tensor, kind: Any, file: str) -> torch.Tensor:
        loss = script.net(x).mean() * factors.get(_key(kind), 1.0)
        loss.backward()
        script.optimizer.step()
        return loss

    @cstorch.trace
    def step_of_batch(batch: Any) -> torch.Tensor:
        loss = script.net(batch["x"]).mean() * factors.get(_key(batch["kind"]), 1.0)
        loss.backward()
        script.optimizer.step()
        return loss

    def body(batch: Any) -> None:
        if by_parts:
            step(batch["x"], batch["kind"], file=batch["file"])
        else:
            step_of_batch(batch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script.loop(body, batches, num_steps=4)
    return [str(item.message) for item in caught if "traced once" in str(item.message)]


@pytest.mark.parametrize("changes_at", [2, 3])
@pytest.mark.parametrize("by_parts", [False, True])
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_a_batch_that_change_the_step_are_named(
    cluster: FakeCluster, tmp_path: Path, name: str, by_parts: bool, changes_at: int
) -> None:
    (message,) = _objects_are_used(cluster, tmp_path, _batches(*OBJECTS[name], changes_at), by_parts)
    assert f"the step of batch {changes_at} would give `aten::mul` the number 1.0" in message
    assert "['kind']" in message
    assert "test_later_calls.py:" in message


@pytest.mark.parametrize("by_parts", [False, True])
def test_objects_that_the_step_does_not_use_may_change(cluster: FakeCluster, tmp_path: Path, by_parts: bool) -> None:
    assert not _objects_are_used(cluster, tmp_path, _batches("even", "even", 2), by_parts)


def test_with_objects_the_generators_are_as_with_tensors_alone() -> None:
    states = []
    for beside in ((), ("a",)):

        class Drawn:
            def __iter__(self, beside: tuple[str, ...] = beside) -> Any:
                return ({"x": torch.rand(4, 2), "beside": beside} for _ in range(5))

        torch.manual_seed(0)
        batches = DataLoader(Drawn).first_batches(3)
        assert len(batches) == (3 if beside else 1)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
