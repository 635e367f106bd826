"""The schedule classes that are made from a table are as written classes are."""

import inspect
import pickle
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from schedule_cases import optimizer

from cstorch.optim import lr_scheduler, scheduler, weight_decay_scheduler
from cstorch.optim.scheduler_base import Scheduler, Tags

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import schedule_stubs  # noqa: E402  from docs

MODULES = [import_module(name) for name in schedule_stubs.MODULES]
MADE = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if inspect.isclass(kind) and issubclass(kind, Scheduler) and kind.__module__ == module.__name__
]


def test_all_of_them_are_looked_at() -> None:
    assert len(MADE) == 21 + 20 + 15


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
def test_a_class_is_found_by_its_name_and_describes_its_parameters(kind: type[Any]) -> None:
    assert pickle.loads(pickle.dumps(kind)) is kind  # noqa: S301  our own
    assert kind.__init__.__qualname__.endswith(".__init__")
    names = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    assert [*inspect.signature(kind).parameters] == names
    for name in names:
        assert f"\n    {name}: " in (inspect.getdoc(kind) or ""), name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_committed_stubs_are_current(module: Any) -> None:
    text = Path(module.__file__).with_suffix(".pyi").read_text()
    assert text == schedule_stubs.stub(module), "stale: run `python docs/schedule_stubs.py`"


@pytest.mark.parametrize(
    ("form", "learning_rate"),
    [
        ("Constant", {"learning_rate": "val"}),
        ("Polynomial", {"initial_learning_rate": "initial_val", "end_learning_rate": "end_val"}),
        ("Cyclic", {"base_lr": "base_val", "max_lr": "max_val"}),
        ("OneCycle", {"initial_learning_rate": "initial_val", "max_lr": "max_val"}),
        ("PiecewiseConstant", {"learning_rates": "vals"}),
        ("ScalePerParam", {}),
    ],
)
def test_signatures_are_those_of_the_form_with_the_names_of_learning_rates(
    form: str, learning_rate: dict[str, str]
) -> None:
    general = getattr(scheduler, f"{form}Scheduler")
    for kind, names in (
        (getattr(lr_scheduler, f"{form}LR"), learning_rate),
        (getattr(weight_decay_scheduler, f"{form}WD"), {}),
    ):
        own = inspect.signature(kind.__init__).parameters
        expected = dict(inspect.signature(general.__init__).parameters)
        expected.pop("constant_cls", None)
        assert [names.get(name, name) for name in own] == [*expected]
        assert [each.default for each in own.values()] == [each.default for each in expected.values()]
        assert own["param_group_tags"].annotation == Tags
        assert kind.__mro__[1] is general
        base = lr_scheduler.LRScheduler if names or kind.__name__.endswith("LR") else kind.__bases__[1]
        assert kind.__bases__ == (general, base)


def test_a_wrong_argument_is_a_type_error_that_names_the_class() -> None:
    with pytest.raises(TypeError, match=r"LinearLR: missing a required argument: 'end_learning_rate'"):
        lr_scheduler.LinearLR(optimizer(), 0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="ConstantLR: got an unexpected keyword argument 'val'"):
        lr_scheduler.ConstantLR(optimizer(), 0.1, val=0.0)  # type: ignore[call-arg]


class Halved(lr_scheduler.PolynomialLR):
    """A user's subclass with a constructor of its own."""

    def __init__(self, own: torch.optim.Optimizer, rate: float) -> None:
        self.rate = rate
        super().__init__(own, rate / 2, 0.0, total_iters=4)


class Later(Halved):
    """A subclass that is in the middle of two."""

    def _get_closed_form(self) -> torch.Tensor:
        return super()._get_closed_form() * 2


def test_subclasses_are_as_those_of_a_written_class() -> None:
    own = optimizer()
    schedule = Later(own, 8.0)
    assert float(own.param_groups[0]["lr"]) == 8.0
    assert schedule.initial_learning_rate == schedule.initial_val == 4.0
    schedule.step()
    assert float(own.param_groups[0]["lr"]) == 6.0
    assert {"rate", "initial_learning_rate", "end_learning_rate", "last_epoch"} <= schedule.state_dict().keys()


def test_older_names_ignore_their_older_arguments() -> None:
    older = import_module("cerebras_pytorch.optim.lr_scheduler")
    own = optimizer()
    schedule = older.Constant(own, 0.5, 3, True, param_group_tags=None)
    assert isinstance(schedule, lr_scheduler.ConstantLR)
    assert "disable_lr_steps_reset" not in schedule.state_dict()
    scaled = older.ScalePerParamLR(own, schedule, 10, True)
    scaled = older.ScalePerParamLR(
        own, scheduler=older.Constant(own, 0.5), decay_steps=None, disable_lr_steps_reset=True
    )
    assert scaled.get_last_lr() == [0.5]


@pytest.mark.parametrize(
    "package", ["cerebras.pytorch", "cerebras_pytorch", "cerebras_torch", "cerebras.framework.torch"]
)
@pytest.mark.parametrize("method", ["set_lr_lambda", "set_value_lambda"])
def test_functions_are_those_of_a_subclass_under_both_names(package: str, method: str) -> None:
    module = import_module(f"{package}.optim.lr_scheduler")
    divided = type("Divided", (module.LambdaLR,), {method: lambda self: [lambda epoch: 1 / (1 + epoch)]})
    falling = type("Falling", (module.MultiplicativeLR,), {method: lambda self: lambda epoch: 0.5})
    assert values_of(divided(optimizer(), 8.0), 3) == pytest.approx([8.0, 4.0, 8 / 3])
    assert values_of(falling(optimizer(), 8.0, 0.9), 3) == pytest.approx([8.0, 4.0, 2.0])


def test_functions_of_a_subclass_may_add_to_those_of_the_class() -> None:
    class More(lr_scheduler.MultiplicativeLR):
        def set_lr_lambda(self) -> Any:
            coefficient = super().set_lr_lambda()
            return lambda epoch: coefficient(epoch) / 2

    assert values_of(More(optimizer(), 8.0, 0.5), 3) == pytest.approx([8.0, 2.0, 0.5])


@pytest.mark.parametrize("method", ["_get_closed_form", "_get_closed_form_lr"])
def test_the_formula_of_a_subclass_counts_under_both_names(method: str) -> None:
    for name, kind in vars(lr_scheduler).items():
        if (
            inspect.isclass(kind)
            and issubclass(kind, lr_scheduler.LRScheduler)
            and kind is not lr_scheduler.LRScheduler
        ):
            own: Any = type("Own", (kind,), {method: lambda self: self.last_epoch + 0.5})
            schedule = own.__new__(own)
            schedule.last_epoch = torch.tensor(3)
            assert float(schedule.get()) == 3.5, name

    class Divided(lr_scheduler.ConstantLR):
        def formula(self) -> torch.Tensor:
            whole: torch.Tensor = getattr(super(), method)()
            return whole / (1 + self.last_epoch)

    setattr(Divided, method, Divided.formula)
    assert values_of(Divided(optimizer(), 8.0), 3) == pytest.approx([8.0, 4.0, 8 / 3])


def test_a_subclass_with_get_lr_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Torch overrides get_lr, .* in its place define _get_closed_form_lr\(self\)"):
        type("Torch", (lr_scheduler.ConstantLR,), {"get_lr": lambda self: [0.1]})


def values_of(schedule: Any, count: int) -> list[float]:
    values = []
    for _ in range(count):
        values.append(float(schedule.get_last_lr()[0]))
        schedule.step()
    return values
