"""The tokens of jobs: how management knows a coordinator again, even one that another start of it had started.

A token is a keyed hash of the job's name. The key lies in the cluster's cache folder, for its owner's eyes only, so a
management service that is started anew there recognises the jobs of the one before, and nobody else's.
"""

import contextlib
import hmac
import logging
import os
import secrets
from pathlib import Path

from nodes.folders import why_not_kept

KEY_FILE = "management.key"
_KEY_BYTES = 32

logger = logging.getLogger(__name__)


class JobTokens:
    """The tokens under one key."""

    def __init__(self, folder: Path | None) -> None:
        """folder: takes the key, if it has none. Without one that does, the tokens are good until this process ends."""
        self._key = secrets.token_bytes(_KEY_BYTES)
        if folder is not None:
            try:
                self._key = _key_in(folder)
            except OSError as error:
                why = why_not_kept(folder, _KEY_BYTES, error.strerror)
                logger.warning("jobs will end with this management service, as its key cannot be kept in %s", why)

    def token(self, job: str) -> str:
        return hmac.digest(self._key, job.encode(), "sha256").hex()

    def belongs(self, token: str, job: str) -> bool:
        """Whether the token is the job's."""
        return hmac.compare_digest(token.encode(), self.token(job).encode())


def _key_in(folder: Path) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / KEY_FILE
    fresh = folder / f"{KEY_FILE}.{secrets.token_hex(8)}"
    try:
        if path.exists() and path.stat().st_size != _KEY_BYTES:
            path.unlink()  # damaged
        if not path.exists():
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)  # whole, and the first to come
    finally:
        fresh.unlink(missing_ok=True)
    return path.read_bytes()
