"""Only holds packages; other distributions (cerebras_cloud_sdk) have parts of it too."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
