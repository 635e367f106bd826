"""Functions of the script that see values: step and checkpoint closures, and summaries, which are step closures."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from cstorch._internal.execution import Closure, current_execution, current_executor
from cstorch.backend import is_on_csx

# --- step_closure and checkpoint_closure: functions of the script that see values -------------------------------------


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def step_closure(closure: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]:
    """Makes a function run when the tensors that it is called with have values; a decorator.

    On CSX a call is queued and returns None. When the outputs of the step have arrived, the calls run in order on the
    script's thread, with CPU tensors, on activation steps only. A closure receives the last value that the step gave a
    tensor. A closure that is called in the traced function runs again for every step, with the Python arguments of the
    first call. On the CPU, and outside an executor, it runs at once.

    A queued call has copies of the lists, dicts and tuples among its arguments, as they were at the call: what a
    closure collects belongs into a variable of the script.

    Args:
        closure: The function.

    Returns:
        A function with the same parameters, which returns None where the call is queued.

    Raises:
        TypeError: `closure` is not callable.

    Example:
        ::

            @cstorch.step_closure
            def log_loss(loss):
                print(f"step {executor.user_iteration}: {float(loss)}")

            for batch in executor:
                log_loss(training_step(batch))

    Reference: release 2.10, `cerebras.pytorch`.
    """
    return _deferred(closure, at_checkpoint=False)


def checkpoint_closure(closure: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]:
    """Makes a function run on checkpoint steps only, after the step closures; a decorator.

    Within the function the state of exactly that step can be read and saved. Outside an executor it runs at once, as a
    step closure does.

    Args:
        closure: The function.

    Returns:
        A function with the same parameters, which returns None where the call is queued.

    Raises:
        TypeError: `closure` is not callable.

    Example:
        ::

            @cstorch.checkpoint_closure
            def save_checkpoint():
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                cstorch.save(state, f"checkpoint_{executor.user_iteration}.mdl")

            for batch in executor:
                training_step(batch)
                save_checkpoint()

    Reference: release 2.10, `cerebras.pytorch`.
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


# --- Values of the traced step that go to the writer of the executor at hand ------------------------------------------


def summarize_scalar(name: str, scalar: torch.Tensor) -> None:
    """Passes the value of a tensor at the end of every activation step to the executor's writer.

    Args:
        name: The name of the summary.
        scalar: A tensor of rank 0; outside CSX a number too.

    Raises:
        TypeError: On CSX, `scalar` is a Python number, which would be the same in all steps of a trace.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch`.
    """
    if not isinstance(scalar, torch.Tensor) and is_on_csx():
        raise TypeError(
            f"summarize_scalar({name!r}, ...) was given a Python {type(scalar).__name__}, which the traced step sees "
            "once: give it a tensor, or call the writer's add_scalar in a step closure"
        )
    _add_scalar(name, scalar)


def summarize_tensor(name: str, tensor: torch.Tensor) -> None:
    """Passes the value of a tensor at the end of every activation step to the executor's writer.

    Args:
        name: The name of the summary.
        tensor: The tensor, of any shape.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch`.
    """
    _add_tensor(name, tensor)


@step_closure
def _add_scalar(name: str, scalar: Any) -> None:
    writer = _writer()
    if writer is not None:
        writer.add_scalar(name, float(scalar), _step(writer))


@step_closure
def _add_tensor(name: str, tensor: torch.Tensor) -> None:
    writer = _writer()
    if writer is not None:
        writer.add_tensor(name, tensor, _step(writer))


def _writer() -> Any:
    return getattr(current_executor(), "writer", None)


def _step(writer: Any) -> int:
    return current_executor().iteration + getattr(writer, "base_step", 1)
