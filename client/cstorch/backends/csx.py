"""Flags of the CSX backend."""

from cstorch.errors import ConfigurationError, UsageError
from cstorch.execution import current_execution


class CsxPrecision:
    """Flags that say how exactly steps compute."""

    __slots__ = ("_level",)

    def __init__(self) -> None:
        self._level = 1

    @property
    def optimization_level(self) -> int:
        """With mixed precision, how much is computed in half: 0 the least, 2 the most.

        Raises:
            ConfigurationError: on setting it to anything else.
            UsageError: on setting it inside the loop of an executor.
        """
        return self._level

    @optimization_level.setter
    def optimization_level(self, level: int) -> None:
        if type(level) is not int or level not in (0, 1, 2):
            raise ConfigurationError(f"a precision optimization level is one of 0, 1 and 2, not {level!r}")
        if current_execution() is not None:
            raise UsageError("the step is compiled once: set flags before the loop of an executor, not inside it")
        self._level = level


class Csx:
    """All flags of the CSX backend, by topic."""

    __slots__ = ("_precision",)

    def __init__(self) -> None:
        self._precision = CsxPrecision()

    @property
    def precision(self) -> CsxPrecision:
        return self._precision

    def reset(self) -> None:
        """Gives the flags their defaults."""
        self._precision = CsxPrecision()
