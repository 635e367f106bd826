"""Settings of TensorFlow's scripts."""

from cstorch.backends.open_settings import OpenSettings


class CSConfig(OpenSettings):
    """Settings by any name. Waferbox has nothing that they change."""
