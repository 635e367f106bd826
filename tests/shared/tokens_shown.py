"""Tokens of the tests' own cluster."""

from interconnect.security.guard import bearer
from interconnect.security.own_tokens import cluster_secret
from interconnect.security.tokens import Kind


def token(kind: Kind, *names: str) -> str:
    """The token of whoever is so and is called so."""
    return cluster_secret().token(kind, *names)


def shown(kind: Kind, *names: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that shows it."""
    return (bearer(token(kind, *names)),)
