"""step_closure and checkpoint_closure: functions of the script that see values."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from cstorch.execution import Closure, current_execution

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def step_closure(closure: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]:
    """Makes a function that runs when the tensors that it is called with have values.

    On CSX a call is queued and returns None. When the outputs of the step are there, the calls run in order on the
    script's thread, with CPU tensors, on activation steps only. What a closure sees is the last value that the step
    gave a tensor. Called in the traced function, it runs again for every step with the Python arguments of the first
    call. On the CPU, and outside an executor, it runs at once.
    """
    return _deferred(closure, at_checkpoint=False)


def checkpoint_closure(closure: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]:
    """Like `step_closure`, for a function that runs on checkpoint steps only, after the step closures.

    Inside it the state of exactly that step can be read and saved: `cstorch.save({"model": model.state_dict()}, path)`.
    Outside an executor it runs at once, as a step closure does.
    """
    return _deferred(closure, at_checkpoint=True)


def _deferred(function: Callable[Parameters, Result], *, at_checkpoint: bool) -> Callable[Parameters, Result | None]:
    if not callable(function):
        raise TypeError(f"a closure decorates a function, not {type(function).__name__}")

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | None:
        execution = current_execution()
        if execution is None:
            return function(*args, **kwargs)
        closure = Closure(function=function, args=args, kwargs=kwargs, at_checkpoint=at_checkpoint)
        result: Result | None = execution.call_closure(closure)
        return result

    return call
