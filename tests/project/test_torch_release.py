"""The list of torch's private names is that of the code, and the range of releases is the same wherever it stands."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement

from cstorch._internal import torch_release
from cstorch.errors import CstorchWarning

ROOT = Path(__file__).parents[2]
FOLDERS = ("client", "waferbox", "appliance", "workers", "wafer", "memoryx", "swarmx")
# The wafer's compiler of kernels is imported with the first kernel, and takes seconds.
LATE = "torch._inductor"


def dotted(node: ast.expr) -> list[str]:
    """The names of an attribute access from the left; empty if it does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def is_torch(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "torch"


def names_of_torch(tree: ast.Module) -> Iterator[str]:
    """The full names of what a module uses of torch: imported names, and attributes of them."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in filter(lambda name: is_torch(name.name), node.names):
                imported[name.asname or "torch"] = name.name if name.asname else "torch"
                yield name.name
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module):
            imported |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    yield from imported.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (names := dotted(node)) and names[0] in imported:
            yield ".".join([imported[names[0]], *names[1:]])


def private_names() -> set[str]:
    used = {
        name
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name in names_of_torch(ast.parse(path.read_text()))
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        and not name.startswith(LATE)
    }
    return {name for name in used if not any(other.startswith(f"{name}.") for other in used)}


def test_all_private_names_are_checked() -> None:
    # A checked name is used as it is, or what it has is used: `x._base` for `x._base.get`.
    checked, used = set(torch_release.PRIVATE_NAMES), private_names()
    assert [name for name in used if not any(f"{name}.".startswith(f"{known}.") for known in checked)] == []
    assert [known for known in checked if not any(f"{name}.".startswith(f"{known}.") for name in used)] == []


def test_a_missing_name_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*torch_release.PRIVATE_NAMES, "torch._C._gone", "torch._gone.function"]
    monkeypatch.setattr(torch_release, "PRIVATE_NAMES", names)
    with pytest.raises(ImportError) as caught:
        torch_release.check("2.99.1+cpu")
    assert str(caught.value) == (
        "torch 2.99.1+cpu has no torch._C._gone, torch._gone.function, which Waferbox uses; it was tested with torch "
        '2.13 to 2.14: python -m pip install "torch>=2.13,<2.15"'
    )


@pytest.mark.parametrize("version", ["2.12.1", "2.15.0+cpu", "3.0.0", "2.15.0a0+git1234"])
def test_another_release_is_named(version: str) -> None:
    with pytest.warns(CstorchWarning, match=r"Waferbox was not tested with torch .*, but with 2\.13 to 2\.14"):
        torch_release.check(version)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu", "2.14.1+cu130", torch.__version__])
def test_a_tested_release_is_silent(version: str) -> None:
    torch_release.check(version)


def test_the_range_is_the_same_wherever_it_stands() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (requirement,) = [line for line in settings["project"]["dependencies"] if Requirement(line).name == "torch"]
    assert requirement == f"torch{torch_release.RANGE}"
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    releases = workflow["jobs"]["test"]["strategy"]["matrix"]["torch"]
    assert [release.rpartition(".")[0] for release in releases] == [torch_release.FIRST, torch_release.LAST]
    files = [
        *(ROOT / ".github/workflows").iterdir(),
        *map(ROOT.joinpath, ("Makefile", "Dockerfile", "README.md", "docs/tutorial.md")),
    ]
    installed = {
        release
        for file in files
        for release in re.findall(r"torch==(?:\$\(or \$\(TORCH\),)?([\d.]+)", file.read_text())
    }
    assert installed == {releases[0]}
