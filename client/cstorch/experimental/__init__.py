"""What the real system calls experimental. Loops on the wafer and compressed weights are not here: calling says so."""

from typing import Any, NoReturn

from cstorch.errors import UsageError
from cstorch.experimental import listener

__all__ = [
    "Compression",
    "get_loop_iteration_slice",
    "listener",
    "run_implicit_autoregressive_loop",
    "start_implicit_loop",
    "update_implicit_loop",
]


class Compression:
    """Weights in a compressed format. Waferbox cannot do this: the numbers would not be those of the format.

    Raises:
        UsageError: always.
    """

    def __init__(self, format: str, param_filter: Any) -> None:
        raise UsageError(f"weights cannot be sent in the format {format!r}: leave the compression out")

    def apply(self, module: Any) -> None:
        """Is never reached: there is no such object."""


def start_implicit_loop(input_tensor: Any, loop_dim: int) -> NoReturn:
    """Would begin a loop over a dimension of a tensor. Raises UsageError: see `_no_loop`."""
    _no_loop("start_implicit_loop")


def get_loop_iteration_slice(input_tensor: Any, index_tensor: Any) -> NoReturn:
    """Would take the slice of a loop's iteration. Raises UsageError: see `_no_loop`."""
    _no_loop("get_loop_iteration_slice")


def update_implicit_loop(
    input_tensor: Any,
    index_tensor: Any,
    update_tensor: Any,
    stop_sequences_tensor: Any,
    start_token: Any,
    max_tokens: int | None = None,
) -> NoReturn:
    """Would say what each iteration writes, and when the loop ends. Raises UsageError: see `_no_loop`."""
    _no_loop("update_implicit_loop")


def run_implicit_autoregressive_loop(
    input_tensor: Any,
    output_tensor: Any,
    loop_dim: int,
    start_token: Any,
    stop_token: Any = None,
    max_tokens: int | None = None,
    stop_sequences: Any = None,
) -> NoReturn:
    """Would write predictions behind the input until a token stops it. Raises UsageError: see `_no_loop`."""
    _no_loop("run_implicit_autoregressive_loop")


def _no_loop(name: str) -> NoReturn:
    """A step runs once for each batch: a traced program has no loop in which it could run again."""
    raise UsageError(
        f"cstorch.experimental.{name} needs a loop on the wafer, which Waferbox has not: generate one token for each "
        "step, with a batch that holds what there is so far"
    )
