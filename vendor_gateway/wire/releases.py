"""The releases of the vendor's client that are served, and what each expects to hear."""

from collections.abc import Mapping
from typing import Final

# The client refuses a server of another build than its own, and tells its version but not its build. What is served of
# the messages is the same in all of these.
BUILDS: Final[Mapping[str, str]] = {
    "2.6.0": "0c2f21fdef",
    "2.7.0": "e1377561a5",
    "2.7.1": "115095ac7d",
    "2.8.0": "56f21b7ebd",
    "2.9.0": "e2e12a41a8",
    "2.10.0": "32008fd851",
}


class ReleaseRefusedError(ValueError):
    """The client is of a release that is not served."""


def build_of(version: str) -> str:
    """The build that a client of this version wants to speak with. Raises ReleaseRefusedError."""
    release = version.partition("+")[0]
    build = BUILDS.get(release)
    if build is None:
        *others, last = BUILDS
        raise ReleaseRefusedError(
            f"this Waferbox serves cerebras_pytorch and cerebras_appliance {', '.join(others)} and {last}, and this "
            f"client is of release {release[:32] or '(it does not say which)'}: install {last}"
        )
    return build
