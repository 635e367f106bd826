"""Tokens of the tests' own cluster."""

from waferbox.security.guard import bearer
from waferbox.security.tokens import Kind, cluster_secret


def token(kind: Kind, *names: str) -> str:
    """The token of whoever is so and is called so."""
    return cluster_secret().token(kind, *names)


def shown(kind: Kind, *names: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that shows it."""
    return (bearer(token(kind, *names)),)
