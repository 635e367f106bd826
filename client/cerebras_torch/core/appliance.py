"""ApplianceMode, with which scripts of 1.6 to 1.9 drove the cluster step by step; a session takes its place."""

from typing import Any

from cstorch.errors import UsageError


class ApplianceMode:
    """The cluster, step by step. It cannot be made.

    Args:
        *args: Those of the real system.
        **kwargs: Those of the real system.

    Raises:
        UsageError: Always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "ApplianceMode drives the real client's inside: use cerebras_torch.Session, or "
            "cerebras_pytorch.experimental, which release 1.8 has as well"
        )
