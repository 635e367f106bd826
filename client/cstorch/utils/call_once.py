"""Functions that run once."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def call_once(
    error_callable: Callable[[], object] | None = None,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Returns a decorator: the first call runs the function, and later calls return its result. Thread-safe.

    A call that raises does not count.

    Args:
        error_callable: Called by each later call; None: nothing is called.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        lock = threading.Lock()
        results: list[Result] = []

        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with lock:
                if not results:
                    results.append(function(*args, **kwargs))
                elif error_callable is not None:
                    error_callable()
                return results[0]

        return call

    return decorate
