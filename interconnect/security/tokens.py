"""Tokens: text that says who bears it, and proves that it was made by somebody who has the cluster's secret.

A token is `kind:name:...:proof`. The proof is a keyed hash of all before it, so a token is good for what it names and
for nothing else, and the secret itself never travels.
"""

import enum
import hmac
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

MAX_TOKEN_CHARACTERS: Final = 1024


class Kind(enum.Enum):
    """What the bearer of a token is."""

    NODE = "node"  # a process that registers as a node, or an ingress
    MANAGEMENT = "management"  # the management service
    COORDINATOR = "coordinator"  # of the job that is named
    LEASE = "lease"  # a coordinator that was given a node: job, instance of the node, number of the lease
    MEMBER = "member"  # a node that works for a job, to the others: job, member
    JOB = "job"  # the script whose job is named
    USER = "user"  # the user who is named
    ADMIN = "admin"  # the owner of the cluster
    VIEWER = "viewer"  # somebody who may look, and change nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who bears a valid token."""

    kind: Kind
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first of its names: a user or a job; empty where there is none."""
        return self.names[0] if self.names else ""


class ClusterSecret:
    """Makes and checks the tokens of one cluster."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def token(self, kind: Kind, *names: str) -> str:
        """The token of whoever is so and is called so."""
        text = ":".join((kind.value, *(quote(name, safe="") for name in names)))
        return f"{text}:{self._proof(text)}"

    def caller(self, token: str) -> Caller | None:
        """Who bears the token; None if it is not one of this cluster."""
        if len(token) > MAX_TOKEN_CHARACTERS or not token.isascii():
            return None
        text, _, proof = token.rpartition(":")
        if not hmac.compare_digest(proof.encode(), self._proof(text).encode()):
            return None
        kind, *names = text.split(":")
        return Caller(kind=Kind(kind), names=tuple(map(unquote, names)))

    def _proof(self, text: str) -> str:
        return hmac.digest(self._key, text.encode(), "sha256").hex()
