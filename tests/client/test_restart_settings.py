"""How often a job goes on after a death, and with how many wafers, as flags and environment say it."""

import pytest

from cstorch import backends
from cstorch.distributed.run_settings import max_num_restarts, min_num_csx
from cstorch.errors import ConfigurationError


def test_the_flag_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (max_num_restarts(), min_num_csx(4)) == (3, 4)
    monkeypatch.setenv("WAFERBOX_MAX_NUM_RESTARTS", "5")
    monkeypatch.setenv("WAFERBOX_MIN_NUM_CSX", "2")
    assert (max_num_restarts(), min_num_csx(4)) == (5, 2)
    monkeypatch.setattr(backends.csx.cluster, "max_num_restarts", 0)
    monkeypatch.setattr(backends.csx.cluster, "min_num_csx", 3)
    assert (max_num_restarts(), min_num_csx(4)) == (0, 3)


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_number_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv("WAFERBOX_MIN_NUM_CSX", number)
    with pytest.raises(ConfigurationError, match="WAFERBOX_MIN_NUM_CSX must be a number from 1 to 1024"):
        min_num_csx(4)


def test_a_job_goes_on_with_no_more_wafers_than_it_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAFERBOX_MIN_NUM_CSX", "5")
    with pytest.raises(ConfigurationError, match="WAFERBOX_MIN_NUM_CSX is 5, and must be at most num_csx, which is 4"):
        min_num_csx(4)
    monkeypatch.setattr(backends.csx.cluster, "min_num_csx", 5)
    with pytest.raises(ConfigurationError, match="min_num_csx is 5, and must be at most num_csx, which is 4"):
        min_num_csx(4)
