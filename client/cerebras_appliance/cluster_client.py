"""Folders for the workers, as release 1.6 names them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeMount:
    """A folder that the workers need, as an element of `mount_dirs`.

    Args:
        name: Accepted without effect.
        mount_path: The folder.
        container_path: Accepted without effect.
    """

    name: str = ""
    mount_path: str
    container_path: str = ""
