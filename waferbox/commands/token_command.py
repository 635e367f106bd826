"""`waferbox token`: what others show the clusters of this user."""

from typing import Annotated

import typer

from interconnect.security.own_tokens import cluster_secret
from interconnect.security.tokens import Kind
from waferbox.output.console import say


def token(
    user: Annotated[str | None, typer.Option(metavar="NAME", help="For a user: jobs of his own.")] = None,
    view: Annotated[bool, typer.Option("--view", metavar="", help="For somebody who may look, no more.")] = False,
) -> None:
    """Print a token for the clusters of this account: in WAFERBOX_TOKEN it opens them. By default the owner's."""
    if user is not None and view:
        raise typer.BadParameter("--user and --view are for different people")
    secret = cluster_secret()
    if user is not None:
        say(secret.token(Kind.USER, user))
    else:
        say(secret.token(Kind.VIEWER if view else Kind.ADMIN))
