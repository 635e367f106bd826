"""The folder for the files of executions."""

import os
from pathlib import Path

from cstorch.errors import ConfigurationError


def make_artifact_dir(folder: Path) -> None:
    """Makes the folder of artifacts, or one in it, unless it is there.

    Raises:
        ConfigurationError: It cannot be made, or files cannot be made in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "it may not be written"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise ConfigurationError(
            f"the folder {folder} for the files of executions cannot be made, or files in it: {reason}. Name another "
            "by cstorch.backend('CSX', artifact_dir=...), or start the script in a folder that you may write"
        )
