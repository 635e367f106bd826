"""trace: marks the function that is one whole step."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from cstorch.backend import has_backend, use_cs
from cstorch.errors import UsageError
from cstorch.execution import current_execution

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def trace(step_fn: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a function a step: what it does is what runs on the cluster.

    On CSX the body is recorded in the first step; later calls return what the first one returned. Tensors have no
    values in it, Python values are those of the first call, and state must exist before. What is returned can be handed
    to step closures. In the second step the body runs again, to warn of Python values that make it another program: a
    TraceError with WAFERBOX_STRICT=1. On the CPU the body runs every time.
    """
    if not callable(step_fn):
        raise TypeError(f"trace decorates a function, not {type(step_fn).__name__}")

    @functools.wraps(step_fn)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        execution = current_execution()
        if execution is None:
            if has_backend() and use_cs():
                name = getattr(step_fn, "__qualname__", "the traced function")
                raise UsageError(f"{name} is a traced step: on CSX call it inside `for batch in executor:`")
            return step_fn(*args, **kwargs)
        run_step = execution.run_step
        if "torch._dynamo" in sys.modules:  # under torch.compile the recording runs as it is
            run_step = torch.compiler.disable(run_step)  # type: ignore[no-untyped-call]
        result: Result = run_step(step_fn, args, kwargs)
        return result

    return call
