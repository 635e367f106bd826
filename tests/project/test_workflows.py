"""The workflows run commands that exist, and what they publish is what the project builds."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
IMAGES = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["jobs"]
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_and_needs_exist(path: Path) -> None:
    for name, job in jobs(path).items():
        assert job["timeout-minutes"] <= 90, name
        assert job.get("needs", name) in jobs(path)
        for command in (step["run"] for step in job["steps"] if "run" in step):
            for target in re.findall(r"^make (\S+)", command):
                assert target in TARGETS
            for file in re.findall(r"examples/\S+", command):
                assert (ROOT / file).exists()


def test_python_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = "".join(path.read_text() for path in WORKFLOWS)
    least = project["requires-python"].removeprefix(">=")
    assert set(re.findall(r'"(3\.\d+)"', text)) == {least}
    assert f"Programming Language :: Python :: {least}" in project["classifiers"]


def test_images_are_stages_of_the_dockerfile() -> None:
    release = jobs(ROOT / ".github/workflows/release.yml")
    assert set(release["image"]["strategy"]["matrix"]["target"]) <= IMAGES


def test_what_an_image_needs_is_sent_to_its_build() -> None:
    sent = (ROOT / ".dockerignore").read_text().split()
    assert sent[0] == "*"
    assert [name for name in sent if name.startswith("!") and not (ROOT / name[1:]).exists()] == []
