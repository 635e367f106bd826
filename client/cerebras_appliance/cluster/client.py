"""Figures of a run for the real system's management."""

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("cstorch")


class TelemetryClient:
    """A context that logs figures at DEBUG; the real system sends them to dashboards.

    Args:
        mgmt_client: Accepted without effect.
        max_buffer_size: Accepted without effect.
        max_buffer_seconds: Accepted without effect.
    """

    def __init__(self, mgmt_client: Any = None, max_buffer_size: int = 128, max_buffer_seconds: int = 150) -> None:
        self._is_open = False

    def __enter__(self) -> "TelemetryClient":
        self._is_open = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_open = False

    def push(self, metrics: Mapping[str, float], labels: Mapping[str, str] | None = None) -> None:
        """Logs figures. Outside of `with` it does nothing.

        Args:
            metrics: The figures by name.
            labels: Labels of the figures.
        """
        if self._is_open:
            logger.debug("Figures %s, labels %s", dict(metrics), dict(labels or {}))
