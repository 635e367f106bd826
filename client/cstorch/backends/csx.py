"""Flags of the CSX backend."""

from typing import Any

from cstorch import absent
from cstorch.errors import ConfigurationError, UsageError
from cstorch.execution import current_execution


class CsxPrecision:
    """Flags that say how exactly steps compute."""

    __slots__ = ("_level",)

    def __init__(self) -> None:
        self._level = 1

    def __getattr__(self, name: str) -> Any:
        raise absent.error("cstorch.backends.csx.precision", name)

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
        _check_outside_loop()
        self._level = level


class CsxPerformance:
    """Flags that say how steps are made fast."""

    __slots__ = ("_library",)

    def __init__(self) -> None:
        self._library = "aten"

    @property
    def kernel_library(self) -> str:
        """What runs the kernels of layers: "aten", torch's own calls, or "inductor", kernels that torch generates.

        Generated kernels take seconds each to build, once for a cache, and gain little on a CPU. Raises as
        `CsxPrecision.optimization_level`.
        """
        return self._library

    @kernel_library.setter
    def kernel_library(self, library: str) -> None:
        if library not in ("aten", "inductor"):
            raise ConfigurationError(f'the kernel library is "aten" or "inductor", not {library!r}')
        _check_outside_loop()
        self._library = library


def _check_outside_loop() -> None:
    if current_execution() is not None:
        raise UsageError("the step is compiled once: set flags before the loop of an executor, not inside it")


class Csx:
    """All flags of the CSX backend, by topic."""

    __slots__ = ("_performance", "_precision")

    def __init__(self) -> None:
        self.reset()

    def __getattr__(self, name: str) -> Any:
        raise absent.error("cstorch.backends.csx", name)

    @property
    def precision(self) -> CsxPrecision:
        return self._precision

    @property
    def performance(self) -> CsxPerformance:
        return self._performance

    def reset(self) -> None:
        """Gives the flags their defaults."""
        self._precision = CsxPrecision()
        self._performance = CsxPerformance()
