"""The kinds of backends."""

from enum import Enum

from cstorch.errors import ConfigurationError


class BackendType(Enum):
    """The kinds of backends."""

    CPU = "CPU"
    CSX = "CSX"

    @classmethod
    def from_str(cls, name: str) -> "BackendType":
        """The backend type of this name, in any case.

        Raises:
            ConfigurationError: there is none.
        """
        if name.upper() == "GPU":
            raise ConfigurationError('Waferbox has no GPU backend: use "CPU", or "CSX" for a cluster')
        try:
            return cls[name.upper()]
        except KeyError:
            raise ConfigurationError(f"unknown backend {name!r}: use one of {', '.join(cls.__members__)}") from None

    @property
    def is_cpu(self) -> bool:
        return self is BackendType.CPU

    @property
    def is_gpu(self) -> bool:
        return False

    @property
    def is_csx(self) -> bool:
        return self is BackendType.CSX
