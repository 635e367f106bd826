"""S3, which Waferbox does not support: no path is valid. A checkpoint there must be copied to a file first."""

from typing import Any

from cerebras_appliance.storage.base_storage import Path, StorageDeleter, StorageReader, StorageWriter
from cstorch.errors import UsageError

__all__ = ["S3Deleter", "S3Reader", "S3Writer"]


class _NoPaths:
    """The base class of objects that cannot be made.

    Args:
        path: The path.
        *args: Those of the real system.
        **kwargs: Those of the real system.

    Raises:
        UsageError: Always.
    """

    def __init__(self, path: Path, *args: Any, **kwargs: Any) -> None:
        raise UsageError(f"{path} cannot be reached: Waferbox keeps checkpoints in files, not in S3")

    @classmethod
    def is_valid_path(cls, path: Path) -> bool:
        """Returns False.

        Args:
            path: The path.
        """
        return False

    @classmethod
    def path_exists(cls, path: Path) -> bool:
        """Returns False.

        Args:
            path: The path.
        """
        return False


class S3Reader(_NoPaths, StorageReader):
    """Cannot be made.

    Raises:
        UsageError: always.
    """

    @property
    def stats(self) -> StorageReader.Stats:
        raise NotImplementedError

    def read(self, key: str | None) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError


class S3Writer(_NoPaths, StorageWriter):
    """Cannot be made.

    Raises:
        UsageError: always.
    """


class S3Deleter(_NoPaths, StorageDeleter):
    """Cannot be made.

    Raises:
        UsageError: always.
    """

    def delete(self, key: str | None = None) -> bool:
        raise NotImplementedError
