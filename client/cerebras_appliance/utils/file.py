"""Helpers for files."""

import os
import uuid
from pathlib import Path
from typing import Any


def create_symlink(src: str | os.PathLike[str], dst: str | os.PathLike[str], **kwargs: Any) -> None:
    """Makes a symbolic link, and replaces the file or link that may be there.

    Args:
        src: The link. If several processes make it at a time, the last one wins.
        dst: The target, relative to the link's folder.
        **kwargs: The arguments of Path.symlink_to.

    Raises:
        OSError: The link cannot be made, for instance because a folder has its name.
    """
    link = Path(src)
    new = link.with_name(f".{link.name}.{uuid.uuid4().hex}")
    new.symlink_to(dst, **kwargs)
    try:
        new.replace(link)
    except OSError:
        new.unlink()
        raise
