"""The class of scripts of 1.6 to 1.9 that drove the cluster step by step. Here a session does."""

from typing import Any

from cstorch.errors import UsageError


class ApplianceMode:
    """Cannot be made.

    Raises:
        UsageError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "ApplianceMode drives the real client's inside: use cerebras_torch.Session, or "
            "cerebras_pytorch.experimental, which release 1.8 has as well"
        )
