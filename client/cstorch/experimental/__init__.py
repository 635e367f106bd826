"""The experimental names of the real system. Loops on the wafer and compressed weights raise an error."""

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
    """A format of compressed weights. It cannot be made: the numbers would not be those of the format.

    Args:
        format: The name of the format.
        param_filter: The parameters to compress.

    Raises:
        UsageError: Always.

    Reference: release 2.10, `cerebras.pytorch.experimental`.
    """

    def __init__(self, format: str, param_filter: Any) -> None:
        raise UsageError(f"weights are sent in no compressed format, such as {format!r}: leave the compression out")

    def apply(self, module: Any) -> None:
        """Is never reached: there is no such object.

        Args:
            module: The model.
        """


def start_implicit_loop(input_tensor: Any, loop_dim: int) -> NoReturn:
    """Raises an error: there are no loops on the wafer.

    Args:
        input_tensor: The tensor.
        loop_dim: The dimension of the loop.

    Raises:
        UsageError: Always.

    Reference: release 2.10, `cerebras.pytorch.experimental`.
    """
    _no_loop("start_implicit_loop")


def get_loop_iteration_slice(input_tensor: Any, index_tensor: Any) -> NoReturn:
    """Raises an error: there are no loops on the wafer.

    Args:
        input_tensor: The tensor.
        index_tensor: The number of the iteration.

    Raises:
        UsageError: Always.

    Reference: release 2.10, `cerebras.pytorch.experimental`.
    """
    _no_loop("get_loop_iteration_slice")


def update_implicit_loop(
    input_tensor: Any,
    index_tensor: Any,
    update_tensor: Any,
    stop_sequences_tensor: Any,
    start_token: Any,
    max_tokens: int | None = None,
) -> NoReturn:
    """Raises an error: there are no loops on the wafer.

    Args:
        input_tensor: The tensor.
        index_tensor: The number of the iteration.
        update_tensor: What the iteration writes.
        stop_sequences_tensor: The sequences that end the loop.
        start_token: The token at which the loop begins.
        max_tokens: The greatest number of tokens.

    Raises:
        UsageError: Always.

    Reference: release 2.10, `cerebras.pytorch.experimental`.
    """
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
    """Raises an error: there are no loops on the wafer.

    Args:
        input_tensor: The tokens of the prompt.
        output_tensor: The predictions.
        loop_dim: The dimension of the loop.
        start_token: The token at which the loop begins.
        stop_token: The token that ends it.
        max_tokens: The greatest number of tokens.
        stop_sequences: The sequences that end it.

    Raises:
        UsageError: Always.
    """
    _no_loop("run_implicit_autoregressive_loop")


def _no_loop(name: str) -> NoReturn:
    """Raises UsageError: a traced program runs once for each batch and has no loop within."""
    raise UsageError(
        f"cstorch.experimental.{name} needs a loop on the wafer, which Waferbox has not: generate one token for each "
        "step, with a batch that holds what there is so far"
    )
