"""Figures of a run for the real system's management."""

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("cstorch")


class TelemetryClient:
    """Takes figures within `with`, for dashboards of the real system. Here they go to the log, at DEBUG.

    mgmt_client, max_buffer_size, max_buffer_seconds: accepted; nothing is sent, so nothing waits.
    """

    def __init__(self, mgmt_client: Any = None, max_buffer_size: int = 128, max_buffer_seconds: int = 150) -> None:
        self._is_open = False

    def __enter__(self) -> "TelemetryClient":
        self._is_open = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_open = False

    def push(self, metrics: Mapping[str, float], labels: Mapping[str, str] | None = None) -> None:
        """Logs figures by name, with labels. Outside of `with`: nothing."""
        if self._is_open:
            logger.debug("Figures %s, labels %s", dict(metrics), dict(labels or {}))
