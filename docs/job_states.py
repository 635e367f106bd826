"""Draws the states of a job in docs/architecture.md: the transitions of its driver. `python docs/job_states.py`."""

import re
from pathlib import Path
from typing import Final

from appliance.coordinator.driver import TRANSITIONS, JobState

PAGE: Final = Path(__file__).parent / "architecture.md"
BLOCK: Final = re.compile(r"```mermaid\nstateDiagram-v2\n.*?```", re.DOTALL)


def diagram() -> str:
    """Returns the diagram: all transitions but those to ENDED, to which every state leads."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {JobState.QUEUED.value}"]
    for state, following in TRANSITIONS.items():
        others = sorted(other.value for other in following - {JobState.ENDED})
        lines += [f"    {state.value} --> {other}" for other in others]
    return "\n".join([*lines, "```"])


def page() -> str:
    """Returns the page with the diagram."""
    text, count = BLOCK.subn(lambda _: diagram(), PAGE.read_text())
    assert count == 1, f"{PAGE} has one diagram of states"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
