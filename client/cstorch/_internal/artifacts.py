"""The folder for the files of executions."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from cstorch.errors import ConfigurationError
from waferbox.host.folders import write_whole

logger = logging.getLogger("cstorch.execution")


def make_artifact_dir(folder: Path) -> None:
    """Makes the folder of artifacts, or one in it, unless it is there.

    Raises:
        ConfigurationError: It cannot be made, or files cannot be made in it.
    """
    with writes_in(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it may not be written")


@contextlib.contextmanager
def writes_in(folder: Path) -> Iterator[None]:
    """Names the folder, and the way out, in the error of a write within the context.

    Raises:
        ConfigurationError: The write has failed.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"the folder {folder} for the files of executions cannot be made, or files in it: "
            f"{error.strerror or error}. Name another by cstorch.backend('CSX', artifact_dir=...), or start the script "
            "in a folder that you may write"
        ) from None


def write_for_information(path: Path, text: str) -> None:
    """Writes a file that no step needs; logs a warning if it cannot be written, as on a full disk."""
    try:
        write_whole(path, text.encode(), durable=False, by_umask=True)
    except OSError as error:
        logger.warning(
            "%s is not written: %s. The execution goes on; commands that look for it here lack this file",
            path,
            error.strerror or error,
        )
