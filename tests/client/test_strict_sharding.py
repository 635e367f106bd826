"""Gathering rows of all wafers: the cluster's warning is shown, and a script may have it refused."""

import logging
from pathlib import Path

import pytest
from fake_cluster import FakeCluster
from halved_weight import Setup, run

from cstorch.backends import csx
from wsc.v1 import coordinator_pb2

VARIABLE = "WAFERBOX_STRICT_SHARDING"


@pytest.mark.parametrize(
    ("flag", "variable", "expected"),
    [(None, "", False), (None, "1", True), (True, "", True), (False, "1", False)],
)
def test_the_flag_comes_before_the_variable(
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: bool | None,
    variable: str,
    expected: bool,
) -> None:
    monkeypatch.setenv(VARIABLE, variable)
    csx.performance.strict_sharding = flag
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), setup.step)
    assert [options.strict_sharding for options in cluster.options] == [expected]


def test_warnings_of_a_compile_are_shown(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.found = coordinator_pb2.CompileResponse(warnings=["Rows of the whole batch are gathered"])
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), setup.step)
    (record,) = [record for record in caplog.records if record.message == "Rows of the whole batch are gathered"]
    assert record.levelno == logging.WARNING
