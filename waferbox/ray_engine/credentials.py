"""The secret of a cluster and its certificates on their way to other hosts, and as files there for one role process."""

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

_PREFIX: Final = "waferbox-ray-"  # and the process id of the actor whose folder it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Never printed; the key of the authority is not among them."""

    key: bytes = field(repr=False)
    certificates: dict[str, bytes] = field(repr=False)  # by the names of their files; empty: no TLS

    def lay_out(self) -> tuple[Path, dict[str, str]]:
        """In a folder that this user alone may read; returns it, and the variables that lead a process to it.

        What actors that were killed have left on this host goes.
        """
        _sweep()
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        for name, content in {SECRET_FILE: self.key, **self.certificates}.items():
            with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
        variables = {settings.SECRET_FILE.name: str(folder / SECRET_FILE)}
        if self.certificates:
            variables[settings.TLS_DIR.name] = str(folder)
        return folder, variables


def own_credentials() -> Credentials:
    """Those of the clusters of this process. Raises OSError."""
    folder = tls_folder()
    certificates = {} if folder is None else {name: (folder / name).read_bytes() for name in (AUTHORITY, NODE)}
    return Credentials(key=cluster_secret_key(), certificates=certificates)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays
