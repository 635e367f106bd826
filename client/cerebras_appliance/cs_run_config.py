"""The configuration of TensorFlow's estimator, which Waferbox has not."""

from typing import Any

from cstorch.errors import UsageError


class CSRunConfig:
    """Cannot be made: scripts for TensorFlow do not run here.

    Raises:
        UsageError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("CSRunConfig configures TensorFlow's estimator: Waferbox runs PyTorch, with a CSConfig")
