"""The configuration of TensorFlow's estimator, which Waferbox does not support."""

from typing import Any

from cstorch.errors import UsageError


class CSRunConfig:
    """The configuration of TensorFlow's estimator. It cannot be made: scripts for TensorFlow do not run here.

    Args:
        *args: Those of the real system.
        **kwargs: Those of the real system.

    Raises:
        UsageError: Always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("CSRunConfig configures TensorFlow's estimator: Waferbox runs PyTorch, with a CSConfig")
