"""Recovery points of a store, for tests that act as the node."""

from collections.abc import Callable
from pathlib import Path

import pytest

from waferbox.states.point_shares import PointShares
from waferbox.states.store import StateStore
from wsc.v1 import node_pb2

OWNER = "memoryx-0 of job-1"


def recovery_points_of(
    store: StateStore, folder: Path | None = None, announce: Callable[[node_pb2.RecoveryPointKept], None] | None = None
) -> PointShares:
    """Returns the point shares of a store. folder: the folder of the files; None: the test must keep no point."""

    def find_folder() -> Path:
        assert folder is not None, "the test has no folder for a point"
        return folder

    def report(kept: node_pb2.RecoveryPointKept) -> None:
        if announce is not None:
            announce(kept)

    def fail(error: Exception) -> None:
        pytest.fail(f"a defect in the thread that writes: {error}")

    return PointShares(store, find_folder, OWNER, report, fail)
