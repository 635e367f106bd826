"""Constructors tell the truth: configurations are made from the annotations of optimizers and schedules."""

import inspect
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from cerebras.appliance.utils.classes import retrieve_all_subclasses
from cerebras.pytorch.optim.optimizer import ParamsT

import cerebras.pytorch as cstorch

LRScheduler = cstorch.optim.lr_scheduler.LRScheduler
WeightDecayScheduler = cstorch.optim.weight_decay_scheduler.WeightDecayScheduler


def parameters(cls: type[Any]) -> dict[str, Any]:
    """The annotations of a constructor, by parameter."""
    found = dict(inspect.signature(cls.__init__).parameters)
    found.pop("self")
    assert [*found] == [*inspect.signature(cls).parameters]
    return {name: parameter.annotation for name, parameter in found.items()}


def own(cls: type[Any]) -> Iterator[type[Any]]:
    return (found for found in retrieve_all_subclasses(cls) if found.__module__.startswith("cstorch."))


@pytest.mark.parametrize("cls", [*own(cstorch.optim.Optimizer)])
def test_optimizers(cls: type[Any]) -> None:
    annotations = parameters(cls)
    assert annotations["params"] == ParamsT
    assert annotations.get("lr", float) is float
    assert not {"args", "kwargs"} & annotations.keys()


@pytest.mark.parametrize("base", [LRScheduler, WeightDecayScheduler])
def test_schedules(base: type[Any]) -> None:
    of_schedules = {}
    for cls in own(base):
        annotations = parameters(cls)
        assert all(isinstance(annotation, type) or get_args(annotation) for annotation in annotations.values()), cls
        if "optimizer" in annotations:
            assert annotations["optimizer"] is torch.optim.Optimizer, cls
        of_schedules[cls] = annotations.get("scheduler") or annotations.get("schedulers")
    suffix = "LR" if base is LRScheduler else "WD"
    names = {cls.__name__.removesuffix(suffix): annotation for cls, annotation in of_schedules.items() if annotation}
    assert names.pop("ScalePerParam") is base
    assert names.pop("ChainedScheduler", list[base]) == list[base]  # type: ignore[valid-type]
    assert names == {"Sequential": list[base], "Chained": list[base]}  # type: ignore[valid-type]


def test_weight_decay_schedules_have_the_parameters_of_their_form() -> None:
    schedules = cstorch.optim.weight_decay_scheduler
    for cls in own(WeightDecayScheduler):
        name = cls.__name__.removesuffix("WD")
        form = getattr(cstorch.optim.scheduler, f"{name}Scheduler")
        expected = [*parameters(form)]
        assert [*parameters(cls)] == [parameter for parameter in expected if parameter != "constant_cls"]
        assert getattr(schedules, f"{name}WD") is cls


def test_names_of_schedules_are_unique() -> None:
    names = [cls.__name__.lower() for cls in own(LRScheduler)]
    assert len(set(names)) == len(names)
    assert "chainedscheduler" in names  # as torch has it, beside "chainedlr"


def test_tags() -> None:
    def optimizer() -> cstorch.optim.SGD:
        groups: list[dict[str, Any]] = [{"params": [torch.ones(1)], "tags": {"a", "b"}}, {"params": [torch.ones(1)]}]
        return cstorch.optim.SGD(groups, lr=9.0)

    def rates(tags: Any) -> list[float]:
        target = optimizer()
        schedule = cstorch.optim.lr_scheduler.ConstantLR(target, 1.0, param_group_tags=tags)
        assert schedule.param_group_tags is None or isinstance(schedule.param_group_tags, set)
        return [float(group["lr"]) for group in target.param_groups]

    assert rates(None) == [1.0, 1.0]
    assert rates("a") == rates(["b", "c"]) == [1.0, 9.0]
    assert rates([None]) == [9.0, 1.0]
    with pytest.raises(ValueError, match="no parameter group has one of the tags"):
        rates("c")
    with pytest.raises(ValueError, match="twice"):
        rates(["a", "a"])


def test_subclasses_by_condition() -> None:
    class Base: ...

    class First(Base): ...

    class Second(First): ...

    assert [*retrieve_all_subclasses(Base)] == [First, Second]
    assert [*retrieve_all_subclasses(Base, lambda cls: cls is not First)] == [Second]
