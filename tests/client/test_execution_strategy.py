"""Which execution strategy a job is made for, and what becomes of the state where it changes."""

from pathlib import Path

import pytest
from fake_cluster import FakeCluster
from halved_weight import NAMES, Setup

from cstorch._internal.session.cluster_session import ClusterSession
from cstorch._internal.session.management import Management
from cstorch.backends import csx
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ConfigurationError
from wsc.v1 import plan_pb2

STREAMING, PIPELINE = plan_pb2.EXECUTION_STRATEGY_WEIGHT_STREAMING, plan_pb2.EXECUTION_STRATEGY_PIPELINE
VARIABLE = "WAFERBOX_EXECUTION_STRATEGY"


def steps(setup: Setup, count: int = 1) -> None:
    for batch in setup.executor(count, checkpoint_steps=1):
        setup.step(batch)


@pytest.mark.parametrize(
    ("flag", "variable", "expected"),
    [
        (None, None, STREAMING),
        (None, "", STREAMING),
        (None, "pipeline", PIPELINE),
        ("pipeline", None, PIPELINE),
        ("weight_streaming", "pipeline", STREAMING),
        ("pipeline", "weight_streaming", PIPELINE),
    ],
)
def test_the_flag_comes_before_the_variable(
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: str | None,
    variable: str | None,
    expected: int,
) -> None:
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    csx.performance.execution_strategy = flag
    steps(Setup(cluster, tmp_path))
    assert [job.execution_strategy for job in cluster.created] == [expected]
    assert [options.execution_strategy for options in cluster.options] == [expected]


def test_a_wrong_name_is_refused_with_the_right_ones(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="must be one of 'weight_streaming', 'pipeline', not 'pipelined'"):
        csx.performance.execution_strategy = "pipelined"
    monkeypatch.setenv(VARIABLE, "pipelined")
    with pytest.raises(ConfigurationError, match=f"{VARIABLE} must be weight_streaming or pipeline, not 'pipelined'"):
        steps(Setup(cluster, tmp_path))


def test_where_the_strategy_changes_the_state_moves_to_another_job(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    steps(setup)
    assert setup.weight() == 1 / 2
    for strategy in ("pipeline", "weight_streaming"):
        csx.performance.execution_strategy = strategy
        steps(setup)
        assert cluster.written[-1] == NAMES  # all of it is new there
        steps(setup)
        assert cluster.written[-1] == []  # the job stays
    assert setup.weight() == 1 / 32
    assert [job.execution_strategy for job in cluster.created] == [STREAMING, PIPELINE, STREAMING]


def test_a_flag_that_is_set_after_a_job_was_opened_counts(cluster: FakeCluster, tmp_path: Path) -> None:
    """A backend with an embedded cluster opens one when it is made."""
    session = ClusterSession(ClusterConfig(), "", Management(address=cluster.address, source="", is_own=False))
    try:
        session.open_in_background()
        csx.performance.execution_strategy = "pipeline"
        session.open_in_background()
        assert session.job().strategy == PIPELINE
        assert [job.execution_strategy for job in cluster.created] == [STREAMING, PIPELINE]
    finally:
        session.close()
