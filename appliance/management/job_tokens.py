"""The tokens of jobs: how management knows a coordinator again, even one that another start of it had started.

A token is a keyed hash of the job's name. The key lies in the cluster's cache folder, for its owner's eyes only, so a
management service that is started anew there recognises the jobs of the one before, and nobody else's.
"""

import hmac
import logging
import secrets
from pathlib import Path

from nodes.folders import KEY_BYTES, secret_key, why_not_kept

KEY_FILE = "management.key"

logger = logging.getLogger(__name__)


class JobTokens:
    """The tokens under one key."""

    def __init__(self, folder: Path) -> None:
        """folder: takes the key, if it has none. Where it does not, the tokens are good until this process ends."""
        self._key = secrets.token_bytes(KEY_BYTES)
        try:
            self._key = secret_key(folder / KEY_FILE)
        except OSError as error:
            why = why_not_kept(folder, KEY_BYTES, error.strerror)
            logger.warning("jobs will end with this management service, as its key cannot be kept in %s", why)

    def token(self, job: str) -> str:
        return hmac.digest(self._key, job.encode(), "sha256").hex()

    def belongs(self, token: str, job: str) -> bool:
        """Whether the token is the job's."""
        return hmac.compare_digest(token.encode(), self.token(job).encode())
