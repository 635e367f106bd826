"""What the body of a loop computes of a step's values, of state and of the batch: right, or refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from fake_cluster import FakeCluster, State
from hypothesis import given
from hypothesis import strategies as st
from user_script import Script

import cstorch
from cstorch._internal.tracing import LazyTensor, StepAtHand, StepValue
from cstorch.errors import StateError, TraceError, UsageError
from cstorch.utils.data import DataExecutor, DataLoader

ROWS = torch.arange(8.0).reshape(4, 2)


def outputs_of(state: State, step: int) -> dict[str, torch.Tensor]:
    """The loss is the number of the step; the rows are ten times it more in every step."""
    scalars = ("output_values_0", "output_loss", "output_value", "output_total", "output_values")
    return {
        **{name: torch.tensor(float(step)) for name in scalars},
        "output_input_0": ROWS + 10 * step,
        "output_rows": ROWS + 10 * step,
        "output_state_model_weight": torch.full((2, 2), float(step)),
        "output_weight": torch.full((2, 2), float(step)),
    }


@pytest.fixture
def script(cluster: FakeCluster, tmp_path: Path) -> Script:
    cluster.step = outputs_of
    return Script(tmp_path, cluster)


class Noted:
    """A step closure that keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[Any] = []

        @cstorch.step_closure
        def note(value: Any) -> None:
            self.values.append(value)

        self.note = note


def loop(script: Script, body: Callable[[Any, Any], Any], num_steps: int = 3, **settings: Any) -> None:
    script.loop(lambda rows: body(rows, script.step(rows)), [ROWS] * num_steps, num_steps, **settings)


EXPRESSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "arithmetic": lambda rows, loss: 2 * loss.detach() - loss / 4 + 1,
    "comparison": lambda rows, loss: (loss > 1) & (loss <= 2.0),
    "clamp": lambda rows, loss: loss.clamp(1.5, 2.5),
    "stack": lambda rows, loss: torch.stack([loss, loss * 2]).sum(),
    "cast": lambda rows, loss: loss.double().to(torch.int64),
    "rows": lambda rows, loss: rows.argmax(-1) == (rows > loss).sum(-1),
    "views": lambda rows, loss: rows.T[0].reshape(2, 2)[1] + loss,
    "several results": lambda rows, loss: rows.max(dim=0)[0] - rows.split(2)[1].sum(0),
    "in place": lambda rows, loss: (loss * 3).add_(1).mul_(rows.mean()),
    "of another tensor": lambda rows, loss: torch.where(rows > 12, rows, torch.tensor(0.5)),
    "like": lambda rows, loss: torch.ones_like(loss) + torch.zeros_like(rows) + torch.randint_like(rows, 1),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_closure_gets_what_the_body_computes(script: Script, name: str) -> None:
    noted, expression = Noted(), EXPRESSIONS[name]
    loop(script, lambda rows, loss: noted.note({"value": expression(rows, loss), "of": "body"}))
    for step, value in enumerate(noted.values, 1):
        torch.testing.assert_close(value["value"], expression(ROWS + 10 * step, torch.tensor(float(step))))
    assert len(noted.values) == 3


@given(st.lists(st.sampled_from(["+", "-", "*", "min", "keep"]), min_size=1, max_size=6))
def test_expressions_over_several_steps(operations: list[str]) -> None:
    """Of every step's value once, whenever it was written down."""
    at_hand, expected, total = StepAtHand(), torch.tensor(1.0), StepValue(step=0, value=torch.tensor(1.0))
    functions: dict[str, Callable[..., Any]] = {
        "+": torch.add,
        "-": torch.sub,
        "*": torch.mul,
        "min": torch.minimum,
        "keep": lambda total, new: total,
    }

    def half(number: int) -> Callable[[object], torch.Tensor]:
        return lambda source: torch.tensor(number / 2)

    for number, operation in enumerate(operations, 1):
        at_hand.begin()
        new = StepValue(step=number, source=0)
        total = StepValue(step=number, call=(functions[operation], (total, new), {}))
        expected = functions[operation](expected, torch.tensor(number / 2))
        if number % 2 or number == len(operations):
            total.evaluate(half(number))
        else:
            new.evaluate(half(number))
    assert total.evaluate(lambda source: torch.tensor(float("nan"))) == expected


def test_a_running_average_takes_the_value_of_every_step(script: Script) -> None:
    kept: dict[str, Any] = {"average": 0.0, "sum": 0.0, "losses": [], "rows": []}

    def body(rows: Any, loss: Any) -> None:
        kept["average"] = 0.9 * kept["average"] + 0.1 * loss
        kept["sum"] += loss
        kept["losses"].append(loss)
        take(rows)
        kept["rows"].append(rows)

    take = cstorch.step_closure(lambda rows: None)
    loop(script, body)
    assert kept["average"].item() == pytest.approx(0.9 * (0.9 * 0.1 + 0.2) + 0.3)
    assert float(kept["sum"]) == 6.0
    assert torch.stack(kept["losses"]).tolist() == [1.0, 2.0, 3.0]
    assert [float(rows[0, 0]) for rows in kept["rows"]] == [10.0, 20.0, 30.0]


def test_state_given_to_a_closure_behind_the_step_is_that_of_the_step(script: Script) -> None:
    noted = Noted()
    loop(script, lambda rows, loss: noted.note(script.model.weight.detach()[0] * 2))
    assert [value.tolist() for value in noted.values] == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]


def test_the_first_step_decides_which_values_are_sent(script: Script, cluster: FakeCluster) -> None:
    seen: list[Any] = []
    take = cstorch.step_closure(lambda rows: seen.append(rows))
    loop(script, lambda rows, loss: take(rows))
    assert [output[0] for output in cluster.compiled[0]["outputs"]] == ["output_values_0", "output_rows"]
    torch.testing.assert_close(seen, [ROWS + 10 * step for step in (1, 2, 3)])


def test_a_value_first_asked_for_in_a_later_step_is_refused(script: Script) -> None:
    noted, steps = Noted(), iter(range(3))
    with pytest.raises(UsageError, match=r"not an output of the step.*call the closure in every step"):
        loop(script, lambda rows, loss: next(steps) and noted.note(rows))


READS: dict[str, Callable[[Script, Any, Any, Path], Any]] = {
    "save": lambda script, rows, loss, path: cstorch.save(script.model.state_dict(), path / "saved.mdl"),
    "torch.save": lambda script, rows, loss, path: torch.save(script.model.state_dict(), path / "saved.pt"),
    "deepcopy": lambda script, rows, loss, path: copy.deepcopy(script.model.state_dict()),
    "weight.cpu": lambda script, rows, loss, path: script.model.weight.detach().cpu(),
    "weight.numpy": lambda script, rows, loss, path: script.model.weight.detach().numpy(),
    "weight.item": lambda script, rows, loss, path: script.model.weight[0, 0].item(),
    "momentum": lambda script, rows, loss, path: cstorch.save(script.optimizer.state_dict(), path / "saved.mdl"),
    "change": lambda script, rows, loss, path: script.model.weight.data.clamp_(-0.1, 0.1),
    "fill": lambda script, rows, loss, path: script.model.weight.data.zero_(),
    "load": lambda script, rows, loss, path: script.model.load_state_dict(torch.nn.Linear(2, 2).state_dict()),
    "data": lambda script, rows, loss, path: setattr(script.model.weight, "data", torch.zeros(2, 2, device="lazy")),
    "rows": lambda script, rows, loss, path: float(rows.sum()),
    "rows.cpu": lambda script, rows, loss, path: rows.cpu(),
    "rows.tolist": lambda script, rows, loss, path: rows.tolist(),
    "condition": lambda script, rows, loss, path: bool(loss > 1),
    "loss.item": lambda script, rows, loss, path: loss.item(),
    "format": lambda script, rows, loss, path: f"{loss:.3f}",
    "mask": lambda script, rows, loss, path: rows[rows > 1],
    "backward": lambda script, rows, loss, path: loss.backward(),
}


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("name", READS)
def test_reads_and_changes_in_the_body_are_refused(script: Script, tmp_path: Path, name: str, step: int) -> None:
    steps = iter(range(1, 4))
    with pytest.raises(RuntimeError, match=rf"{Path(__file__).name}:\d+"):
        loop(
            script,
            lambda rows, loss: next(steps) == step and READS[name](script, rows, loss, tmp_path),
            checkpoint_steps=1,
        )
    assert not (tmp_path / "saved.mdl").exists()


def test_shapes_of_the_batch_are_known(script: Script) -> None:
    seen: list[Any] = []
    loop(script, lambda rows, loss: seen.append((rows.shape, len(rows), rows.dtype, rows.to("lazy") is rows)))
    assert seen == [((4, 2), 4, torch.float32, True)] * 3


def test_the_body_may_prepare_the_batch(script: Script, cluster: FakeCluster) -> None:
    script.loop(lambda rows: script.step(rows.double().float().view(2, 2, 2).flatten(1)[:, :2] * 2), [ROWS] * 2, 2)
    graph = cluster.compiled[0]["graph"]
    assert "aten.slice" in graph
    assert "aten.mul" in graph


def test_a_value_of_an_earlier_step_is_no_argument(script: Script) -> None:
    kept: list[Any] = []

    def body(rows: Any) -> None:
        kept.append(rows)
        script.step(kept[0])

    with pytest.raises(UsageError, match=r"given a value of step 1 in step 2.*buffer"):
        script.loop(body, [ROWS] * 2, 2)


def test_values_of_steps_without_activations_are_refused(script: Script) -> None:
    kept: list[Any] = []

    def body(rows: Any, loss: Any) -> None:
        kept.append(loss + kept[-1] if kept else loss)

    with pytest.raises(TraceError, match=r"value of step 1 is used, which was not sent.*activation_steps"):
        loop(script, body, activation_steps=3)


def test_what_is_carried_of_the_batch_names_it(script: Script) -> None:
    kept: list[Any] = []

    def body(rows: Any, loss: Any) -> None:
        kept.append(kept[-1] + rows.sum() * loss if kept else rows.sum() * loss)

    with pytest.raises(TraceError, match=r"computed of a tensor of the batch.*return loss, labels"):
        loop(script, body)


def test_state_used_before_the_step_is_refused(script: Script) -> None:
    noted = Noted()

    def body(rows: Any) -> None:
        noted.note(script.model.weight.detach().sum())
        script.step(rows)

    with pytest.raises(TraceError, match=r"before the @cstorch.trace function is called in step 2"):
        script.loop(body, [ROWS] * 2, 2)


def test_a_loop_left_in_its_first_step_has_done_it(script: Script, cluster: FakeCluster) -> None:
    for rows in DataExecutor(DataLoader(lambda: [ROWS]), num_steps=2):
        script.step(rows)
        break
    script.model.weight.detach().cpu()
    assert cluster.stopped_after == [1]


def test_a_loop_left_in_its_first_step_has_no_state_if_that_cannot_begin(script: Script, cluster: FakeCluster) -> None:
    cluster.refuse_compile = (grpc.StatusCode.INVALID_ARGUMENT, "the step needs 3 GiB")
    for rows in DataExecutor(DataLoader(lambda: [ROWS]), num_steps=2):
        script.step(rows)
        break
    with pytest.raises(StateError, match="the step needs 3 GiB"):
        script.model.weight.detach().cpu()
    script.model.load_state_dict(torch.nn.Linear(2, 2).state_dict())
    assert isinstance(script.model.weight, LazyTensor)
    script.model.weight.detach().cpu()


def test_rates_and_schedules_read_behind_the_step(script: Script, cluster: FakeCluster) -> None:
    """In every step a tensor of the step, whatever closures have put in the place of it before."""
    schedule = cstorch.optim.lr_scheduler.ScalePerParamLR(
        script.optimizer, cstorch.optim.lr_scheduler.LinearLR(script.optimizer, 1.0, 0.1, total_iters=4)
    )
    rates: list[Any] = []

    @cstorch.trace
    def step(rows: Any) -> Any:
        loss = script.train(rows)
        schedule.step()
        return loss

    @cstorch.step_closure
    def note(rate: Any) -> None:
        rates.append(float(rate))

    def body(rows: Any) -> None:
        assert script.backend.is_tracing
        step(rows)
        kept.append(script.optimizer.param_groups[0]["lr"])
        note(schedule.get_last_value())
        assert script.backend.is_tracing

    kept: list[Any] = []
    cluster.step = lambda state, number: {
        output: torch.tensor(float(number)) for output, _, _ in cluster.compiled[-1]["outputs"]
    }
    script.loop(body, [ROWS] * 3, 3)
    assert rates == [1.0, 2.0, 3.0]
    assert all(isinstance(rate, LazyTensor) for rate in kept)
    assert not script.backend.is_tracing
