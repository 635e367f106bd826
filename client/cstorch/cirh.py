"""Operations of the real system's compiler that scripts call by name. Waferbox has them not: calling says so."""

from typing import Any, NoReturn

from cstorch.errors import UsageError


def FusedTopK(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises an error: sampling among the k most probable tokens is not supported.

    Args:
        *args: Those of the real system.
        **kwargs: Those of the real system.

    Raises:
        UsageError: Always.
    """
    raise UsageError("cstorch.cirh.FusedTopK samples on the wafer, which Waferbox cannot do: use torch.topk")


def FusedTopP(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises an error: sampling among the most probable tokens that make up p is not supported.

    Args:
        *args: Those of the real system.
        **kwargs: Those of the real system.

    Raises:
        UsageError: Always.
    """
    raise UsageError("cstorch.cirh.FusedTopP samples on the wafer, which Waferbox cannot do: use torch.argmax")
