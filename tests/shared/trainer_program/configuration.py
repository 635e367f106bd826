"""Configurations of classes, made from the annotations of their constructors."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Annotated, Any, ClassVar, get_args, get_origin

import torch
from cerebras.appliance.utils.classes import retrieve_all_subclasses
from cerebras.pytorch.optim.optimizer import ParamsT
from pydantic import BaseModel, BeforeValidator, ConfigDict, create_model

import cerebras.pytorch as cstorch


class Configuration(BaseModel):
    """The arguments of a class, checked against its annotations."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, validate_default=True)

    made_class: ClassVar[type[Any]]

    def make(self, **given: Any) -> Any:
        """The object, and those that its arguments describe; given: arguments that no file can name."""
        names = type(self).model_fields
        settings = {name: _made(getattr(self, name), given) for name in names}
        return self.made_class(**{**settings, **{name: value for name, value in given.items() if name in names}})


def _made(value: Any, given: dict[str, Any]) -> Any:
    if isinstance(value, Configuration):
        return value.make(**given)
    return [_made(item, given) for item in value] if isinstance(value, list) else value


@cache
def configuration_of(cls: type[Any]) -> type[Configuration]:
    """The configuration whose fields are the parameters of a class."""
    parameters = [] if cls.__init__ is object.__init__ else [*inspect.signature(cls.__init__).parameters.values()][1:]
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters), parameters
    fields: dict[str, Any] = {"made_class": (ClassVar[type[Any]], cls)}
    for parameter in parameters:
        fields[parameter.name] = (_field(parameter.annotation), _default(parameter))
    return create_model(f"{cls.__name__}Configuration", __base__=Configuration, **fields)


def _default(parameter: inspect.Parameter) -> Any:
    if parameter.annotation in (torch.optim.Optimizer, ParamsT):
        return None
    return ... if parameter.default is parameter.empty else parameter.default


def _field(annotation: Any) -> Any:
    """What a file has for a parameter: other objects by their names, and nothing for what the program gives."""
    if annotation in (torch.optim.Optimizer, ParamsT):
        return Any
    if get_origin(annotation) is list:
        return list[_field(*get_args(annotation))]  # type: ignore[misc]
    return named(annotation) if annotation in _BASES else annotation


def named(base: type[Any]) -> Any:
    """One of the subclasses of a class: `{name: arguments}`."""
    return Annotated[Any, BeforeValidator(partial(_choose, base))]


def _choose(base: type[Any], value: Any) -> Configuration:
    if isinstance(value, Configuration):
        return value
    ((name, arguments),) = value.items()
    classes = {found.__name__.lower(): found for found in retrieve_all_subclasses(base, _is_concrete)}
    return configuration_of(classes[name.lower()])(**(arguments or {}))


_is_concrete: Callable[[type[Any]], bool] = lambda cls: not inspect.isabstract(cls)  # noqa: E731
_BASES = (cstorch.optim.lr_scheduler.LRScheduler, cstorch.optim.weight_decay_scheduler.WeightDecayScheduler)
