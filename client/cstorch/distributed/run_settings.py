"""The execution strategy, strict sharding, the restarts and the fewest wafers, from flags and the environment."""

from typing import Any, Final, TypeVar

from cstorch import backends
from cstorch.errors import ConfigurationError
from waferbox import settings
from wsc.v1 import plan_pb2

# --- The execution strategy: weights streamed layer by layer, or all layers of a small model on the wafer at once -----


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
    return STRATEGIES[configured(settings.EXECUTION_STRATEGY) if name is None else name]


def is_strategy_in_environment() -> bool:
    """Whether the environment variable names an execution strategy."""
    return settings.EXECUTION_STRATEGY.is_set()


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


# --- Rows of other wafers: gathered with a warning, or refused --------------------------------------------------------


def strict_sharding() -> bool:
    """Returns whether a step that gathers rows of all wafers is refused: by the flag, or else the environment."""
    strict = backends.csx.performance.strict_sharding
    return configured(settings.STRICT_SHARDING) if strict is None else bool(strict)


# --- Restarts after the death of a node, and the fewest wafers --------------------------------------------------------


def max_num_restarts() -> int:
    """Returns the number of the flag, or else of the environment variable, or else 3. With 0 a death ends the job.

    Raises:
        ConfigurationError: The variable is no such number.
    """
    number = backends.csx.cluster.max_num_restarts
    return configured(settings.MAX_NUM_RESTARTS) if number is None else int(number)


def min_num_csx(num_csx: int) -> int:
    """Returns the fewest wafers that the job resumes with: of the flag, or else of the environment variable.

    Args:
        num_csx: The number of wafers that the job begins with, which is the default.

    Raises:
        ConfigurationError: The number is out of range.
    """
    name, number = "min_num_csx", backends.csx.cluster.min_num_csx
    if number is None:
        name, number = settings.MIN_NUM_CSX.name, configured(settings.MIN_NUM_CSX) or num_csx
    if number > num_csx:
        raise ConfigurationError(f"{name} is {number}, and must be at most num_csx, which is {num_csx}")
    return int(number)


# --- The environment --------------------------------------------------------------------------------------------------

T = TypeVar("T")


def configured(variable: settings.Variable[T]) -> T:
    """Returns the value of an environment variable. Raises ConfigurationError: its text has another form."""
    try:
        return variable.get()
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
