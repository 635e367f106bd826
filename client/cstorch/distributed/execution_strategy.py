"""How steps are run: weights streamed layer by layer, or all layers of a small model on the wafer at once."""

import os
from typing import Any, Final

from cstorch import backends
from cstorch.errors import ConfigurationError
from wsc.v1 import plan_pb2

STRATEGY_VARIABLE: Final = "WAFERBOX_EXECUTION_STRATEGY"
STRATEGIES: Final = {
    "weight_streaming": plan_pb2.EXECUTION_STRATEGY_WEIGHT_STREAMING,
    "pipeline": plan_pb2.EXECUTION_STRATEGY_PIPELINE,
}
_ENUMERATION: Final = {"ES_WEIGHT_STREAMING": "weight_streaming", "ES_PIPELINE": "pipeline"}


def execution_strategy() -> "plan_pb2.ExecutionStrategy.ValueType":
    """What the flag says, or else the environment variable, or else weight streaming.

    Raises:
        ConfigurationError: the variable names no strategy.
    """
    name = backends.csx.performance.execution_strategy
    if name is None:
        name = os.environ.get(STRATEGY_VARIABLE) or "weight_streaming"
        if name not in STRATEGIES:
            raise ConfigurationError(
                f"the environment variable {STRATEGY_VARIABLE} must be {' or '.join(STRATEGIES)}, not {name!r}"
            )
    return STRATEGIES[name]


def strategy_name(strategy: Any) -> str | None:
    """The name of a strategy that is named, or a value of ExecutionStrategy; None stays None.

    Raises:
        ConfigurationError: there is no such strategy.
    """
    name = getattr(strategy, "name", strategy)  # of an enumeration
    name = _ENUMERATION.get(name, name) if isinstance(name, str) else name
    if name is not None and name not in STRATEGIES:
        raise ConfigurationError(f"execution_strategy must be {' or '.join(STRATEGIES)}, got {strategy!r}")
    return name
