"""Every name that the public scripts of a release use is there, of the right kind, and takes what they give it."""

import sys
import tomllib
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

from name_uses import found, misuses  # noqa: E402  from docs

NAMES: dict[str, dict[str, list[str]]] = tomllib.loads((DOCS / "public_names.toml").read_text())


@pytest.mark.parametrize("release", NAMES)
def test_names_of_a_release(release: str) -> None:
    wrong = []
    for name, uses in NAMES[release].items():
        try:
            wrong += [f"{name} does not fit {use}" for use in misuses(found(name), uses)]
        except (AttributeError, ImportError) as error:
            wrong.append(f"{name}: {error}")
    assert wrong == []


@pytest.mark.parametrize("release", NAMES)
def test_there_are_facts_of_a_release(release: str) -> None:
    assert len(NAMES[release]) > 60


@pytest.mark.parametrize(
    ("use", "fits"),
    [
        ("call(2, c)", True),
        ("call(0, c, ...)", True),
        ("call(1)", False),
        ("call(2, d)", False),
        ("call(4)", False),
        ("class", False),
        ("module", True),
        ("decorator", True),
        ("value", True),
    ],
)
def test_a_use_fits_or_not(use: str, fits: bool) -> None:
    def sample(a: int, b: int, c: int = 1) -> None:
        pass

    assert list(misuses(sample, [use])) == ([] if fits else [use])
