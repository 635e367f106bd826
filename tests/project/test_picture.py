"""docs/images/architecture.svg is what docs/picture.py draws, of names and links that the code has."""

import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import picture  # noqa: E402  from docs


def test_the_committed_picture_is_current() -> None:
    assert (DOCS / "images" / "architecture.svg").read_text() == picture.picture(), "stale: run docs/picture.py"


def test_all_links_of_a_job_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "LINKS", picture.LINKS - {("worker", "WAFER", "wafer", "WORKER")})
    with pytest.raises(AssertionError, match=r"draw what has changed.*worker"):
        picture.picture()


def test_a_call_that_is_gone_is_noticed() -> None:
    with pytest.raises(KeyError, match="Recompile"):
        picture.calls("Coordinator", "Recompile")


def test_the_commands_that_it_names_are_modules() -> None:
    commands = set(re.findall(r"python -m (\w+)", picture.picture()))
    assert commands == {"appliance", "memoryx", "swarmx", "wafer", "workers"}
    for command in commands:
        assert (DOCS.parent / command / "__main__.py").exists()
