"""Tokens of the tests' own cluster."""

from waferbox.security.guard import bearer
from waferbox.security.tokens import Kind, cluster_secret


def token(kind: Kind, *names: str) -> str:
    """Returns the token of a kind for these names."""
    return cluster_secret().token(kind, *names)


def shown(kind: Kind, *names: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call with the token."""
    return (bearer(token(kind, *names)),)
