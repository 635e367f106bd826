"""The diagram of a job's states in docs/architecture.md is that of the driver."""

import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
import job_states  # noqa: E402  from docs

from appliance.coordinator.driver import TRANSITIONS, JobState  # noqa: E402


def test_the_committed_diagram_is_current() -> None:
    assert job_states.PAGE.read_text() == job_states.page(), "stale: run docs/job_states.py"


def test_every_state_but_the_last_has_transitions_and_leads_to_the_end() -> None:
    assert TRANSITIONS.keys() == set(JobState) - {JobState.ENDED}
    assert all(JobState.ENDED in following for following in TRANSITIONS.values())
