"""Operations of the real system's compiler that scripts call by name. Waferbox has them not: calling says so."""

from typing import Any, NoReturn

from cstorch.errors import UsageError


def FusedTopK(*args: Any, **kwargs: Any) -> NoReturn:
    """Would sample among the k most probable tokens. Raises UsageError always."""
    raise UsageError("cstorch.cirh.FusedTopK samples on the wafer, which Waferbox cannot do: use torch.topk")


def FusedTopP(*args: Any, **kwargs: Any) -> NoReturn:
    """Would sample among the most probable tokens that make up p. Raises UsageError always."""
    raise UsageError("cstorch.cirh.FusedTopP samples on the wafer, which Waferbox cannot do: use torch.argmax")
