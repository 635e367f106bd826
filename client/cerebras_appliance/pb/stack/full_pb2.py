"""All settings of the old compiler."""

from cstorch.backends.open_settings import OpenSettings


class FullConfig(OpenSettings):
    """Settings by any name. Waferbox has nothing that they change."""
