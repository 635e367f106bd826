"""The secret and the certificates of a cluster, sent to another host and written to files there for a role process."""

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from waferbox import settings
from waferbox.security.tls import AUTHORITY, NODE, tls_folder
from waferbox.security.tokens import SECRET_FILE, cluster_secret_key

_PREFIX: Final = "waferbox-ray-"  # of a folder's name, before the process id of its actor


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The secret and the certificates of a cluster, without the key of the authority. Never printed."""

    key: bytes = field(repr=False)
    certificates: dict[str, bytes] = field(repr=False)  # by the names of their files; empty: no TLS

    def lay_out(self) -> tuple[Path, dict[str, str]]:
        """Writes the credentials to a new folder that only this user may read.

        Removes the folders of killed actors of this host.

        Returns:
            The folder, and the environment variables by which a process finds its files.
        """
        _remove_stale_folders()
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        for name, content in {SECRET_FILE: self.key, **self.certificates}.items():
            with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
        variables = {settings.SECRET_FILE.name: str(folder / SECRET_FILE)}
        if self.certificates:
            variables[settings.TLS_DIR.name] = str(folder)
        return folder, variables


def own_credentials() -> Credentials:
    """The credentials of this process's clusters. Raises OSError."""
    folder = tls_folder()
    certificates = {} if folder is None else {name: (folder / name).read_bytes() for name in (AUTHORITY, NODE)}
    return Credentials(key=cluster_secret_key(), certificates=certificates)


def _remove_stale_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)  # fails for the folders of other users
