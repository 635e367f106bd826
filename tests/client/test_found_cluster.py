"""The cluster that a script uses: the named one, that of `waferbox up` on this machine, or one of its own."""

import logging
from contextlib import ExitStack
from pathlib import Path

import pytest

from cstorch._internal.session.management import find_management
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ConfigurationError
from waferbox.launch.local_clusters import Starter, recorded


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExitStack:
    """Takes clusters that run."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("WAFERBOX_MANAGEMENT", raising=False)
    monkeypatch.delenv("CSCONFIG_PATH", raising=False)
    return ExitStack()


def address(**settings: str) -> str | None:
    management = find_management(ClusterConfig(**settings))  # type: ignore[arg-type]
    return None if management is None else management.address


def test_a_script_uses_the_cluster_of_up(
    running: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="cstorch.cluster")
    with running:
        running.enter_context(recorded(Starter.SCRIPT, "train", "a:1"))
        running.enter_context(recorded(Starter.RUN, "train", "b:1"))
        assert address() is None  # those of other scripts are not for this one
        running.enter_context(recorded(Starter.UP, "up", "c:1"))
        management = find_management(ClusterConfig())
        assert management is not None
        assert (management.address, management.is_own) == ("c:1", True)
        (message,) = caplog.messages
        assert "'up' of `waferbox up` at c:1" in message
        assert "WAFERBOX_MANAGEMENT=embedded starts one for this script alone" in message
        assert address(mgmt_address="embedded") is None
        assert address(mgmt_address="d:1") == "d:1"
        assert address(mgmt_address="train-2") == "b:1"
        monkeypatch.setenv("WAFERBOX_MANAGEMENT", "embedded")
        assert address() is None
        assert address(mgmt_address="up") == "c:1"


def test_a_cluster_that_is_too_small_is_not_used(running: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cstorch.cluster")
    with running:
        running.enter_context(recorded(Starter.UP, "up", "a:1", wafers=1, workers=1))
        config = ClusterConfig(num_csx=2)
        assert find_management(config) is None
        assert "'up' of `waferbox up` has too little for this script (wafers: 1, of 2;" in caplog.text
        running.enter_context(recorded(Starter.UP, "large", "b:1", wafers=2, workers=2))
        found = find_management(config)
        assert found is not None
        assert found.address == "b:1"
        assert find_management(ClusterConfig(num_csx=2, num_workers_per_csx=2)) is None
        assert address(mgmt_address="up") == "a:1"


def test_of_several_clusters_one_is_to_be_named(running: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    with running:
        running.enter_context(recorded(Starter.UP, "up", "a:1"))
        running.enter_context(recorded(Starter.UP, "lab", "b:1"))
        with pytest.raises(ConfigurationError, match=r"several clusters .*WAFERBOX_MANAGEMENT=(up|lab)"):
            address()
        monkeypatch.setenv("WAFERBOX_MANAGEMENT", "lab")
        assert address() == "b:1"
        with pytest.raises(ConfigurationError, match=r"mgmt_address .* 'laboratory'.*(up at a:1, lab|lab at b:1, up)"):
            address(mgmt_address="laboratory")


def test_where_no_records_can_be_read_a_script_has_its_own(running: ExitStack, tmp_path: Path) -> None:
    (tmp_path / "waferbox").symlink_to(tmp_path)
    assert address() is None
