"""The execution strategy, the restarts and the fewest wafers of a job, from flags and the environment."""

import os
from typing import Any, Final

from cstorch import backends
from cstorch.errors import ConfigurationError
from wsc.v1 import plan_pb2

# --- The execution strategy: weights streamed layer by layer, or all layers of a small model on the wafer at once -----


STRATEGY_VARIABLE: Final = "WAFERBOX_EXECUTION_STRATEGY"
STRATEGIES: Final = {
    "weight_streaming": plan_pb2.EXECUTION_STRATEGY_WEIGHT_STREAMING,
    "pipeline": plan_pb2.EXECUTION_STRATEGY_PIPELINE,
}
_ENUMERATION: Final = {"ES_WEIGHT_STREAMING": "weight_streaming", "ES_PIPELINE": "pipeline"}


def execution_strategy() -> "plan_pb2.ExecutionStrategy.ValueType":
    """Returns the strategy of the flag, or else of the environment variable, or else weight streaming.

    Raises:
        ConfigurationError: The variable names no strategy.
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
    """Returns the name of a strategy, which is given by its name or as a value of ExecutionStrategy; None for None.

    Raises:
        ConfigurationError: There is no such strategy.
    """
    name = getattr(strategy, "name", strategy)  # of an enumeration
    name = _ENUMERATION.get(name, name) if isinstance(name, str) else name
    if name is not None and name not in STRATEGIES:
        raise ConfigurationError(f"execution_strategy must be {' or '.join(STRATEGIES)}, got {strategy!r}")
    return name


# --- Restarts after the death of a node, and the fewest wafers --------------------------------------------------------


RESTARTS_VARIABLE: Final = "WAFERBOX_MAX_NUM_RESTARTS"
LEAST_VARIABLE: Final = "WAFERBOX_MIN_NUM_CSX"
DEFAULT_MAX_NUM_RESTARTS: Final = 3
MOST_RESTARTS: Final = 1_000_000


def max_num_restarts() -> int:
    """Returns the number of the flag, or else of the environment variable, or else 3. With 0 a death ends the job.

    Raises:
        ConfigurationError: The variable is no such number.
    """
    number = backends.csx.cluster.max_num_restarts
    if number is not None:
        return int(number)
    return _from_environment(RESTARTS_VARIABLE, DEFAULT_MAX_NUM_RESTARTS, 0, MOST_RESTARTS)


def min_num_csx(num_csx: int) -> int:
    """Returns the fewest wafers that the job resumes with: of the flag, or else of the environment variable.

    Args:
        num_csx: The number of wafers that the job begins with, which is the default.

    Raises:
        ConfigurationError: The number is out of range.
    """
    number = backends.csx.cluster.min_num_csx
    if number is None:
        return _from_environment(LEAST_VARIABLE, num_csx, 1, num_csx)
    if number > num_csx:
        raise ConfigurationError(f"min_num_csx is {number}, and must be at most num_csx, which is {num_csx}")
    return int(number)


def _from_environment(variable: str, default: int, least: int, most: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ConfigurationError(
            f"the environment variable {variable} must be a number from {least} to {most}, not {text!r}"
        )
    return int(text)
