"""The releases of the vendor's client that are served, and what each expects to hear."""

from collections.abc import Mapping
from typing import Final

# The client refuses a server of another build than its own, and tells its version but not its build.
BUILDS: Final[Mapping[str, str]] = {"2.10.0": "32008fd851"}


class ReleaseRefusedError(ValueError):
    """The client is of a release that is not served."""


def build_of(version: str) -> str:
    """The build that a client of this version wants to speak with. Raises ReleaseRefusedError."""
    release = version.partition("+")[0]
    build = BUILDS.get(release)
    if build is None:
        served = " and ".join(BUILDS)
        raise ReleaseRefusedError(
            f"this Waferbox serves cerebras_pytorch and cerebras_appliance {served}, and this client is of release "
            f"{release[:32] or '(it does not say which)'}: install {served}"
        )
    return build
