"""Helpers for files."""

import os
import uuid
from pathlib import Path
from typing import Any


def create_symlink(src: str | os.PathLike[str], dst: str | os.PathLike[str], **kwargs: Any) -> None:
    """Makes `src` a symbolic link to `dst`, in the place of the file or link that may be there.

    Args:
        src: the link. Several processes may make it at a time: the last one wins.
        dst: what it leads to, relative to the link's folder.
        **kwargs: for Path.symlink_to.

    Raises:
        OSError: the link cannot be made, as where a folder has its name.
    """
    link = Path(src)
    new = link.with_name(f".{link.name}.{uuid.uuid4().hex}")
    new.symlink_to(dst, **kwargs)
    try:
        new.replace(link)
    except OSError:
        new.unlink()
        raise
