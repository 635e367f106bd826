"""Imports run one way (DESIGN section 1): no role imports another, and nobody imports upwards."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FOLDERS = {
    "appliance": "appliance",
    "cerebras": "client/cerebras",
    "cerebras_appliance": "client/cerebras_appliance",
    "cerebras_pytorch": "client/cerebras_pytorch",
    "cerebras_torch": "client/cerebras_torch",
    "cirh": "cirh",
    "cstorch": "client/cstorch",
    "interconnect": "interconnect",
    "lair": "lair",
    "memoryx": "memoryx",
    "nodes": "nodes",
    "swarmx": "swarmx",
    "wafer": "wafer",
    "waferbox": "waferbox",
    "workers": "workers",
}

MAY_IMPORT = {
    "appliance": {"cirh", "interconnect", "lair", "nodes", "wsc"},
    "cerebras": {"cstorch"},
    "cerebras_appliance": {"cstorch"},
    "cerebras_pytorch": {"cerebras_appliance", "cstorch"},
    "cerebras_torch": {"cstorch"},
    "cirh": {"wsc"},
    "cstorch": {"cirh", "interconnect", "nodes", "wsc"},
    "interconnect": {"wsc"},
    "lair": {"cirh"},
    "memoryx": {"cirh", "interconnect", "lair", "nodes", "wsc"},
    "nodes": {"interconnect", "wsc"},
    "swarmx": {"interconnect", "nodes", "wsc"},
    "wafer": {"cirh", "interconnect", "nodes", "wsc"},
    "waferbox": {"appliance", "cirh", "interconnect", "nodes", "wsc"},
    "workers": {"interconnect", "nodes", "wsc"},
}


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.add(node.module.split(".")[0])
    return names & (FOLDERS.keys() | {"wsc"})


@pytest.mark.parametrize("package", FOLDERS)
def test_imports_run_one_way(package: str) -> None:
    for path in (ROOT / FOLDERS[package]).rglob("*.py"):
        extra = imported_packages(path) - MAY_IMPORT[package] - {package}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def test_files_stay_small() -> None:
    for folder in FOLDERS.values():
        for path in (ROOT / folder).rglob("*.py"):
            lines = len(path.read_text().splitlines())
            assert lines <= 500, f"{path.relative_to(ROOT)} has {lines} lines: split it by idea"


def test_only_the_child_of_a_worker_unpickles() -> None:
    allowed = {"workers/child/loader.py"}
    for folder in FOLDERS.values():
        for path in (ROOT / folder).rglob("*.py"):
            if str(path.relative_to(ROOT)) in allowed:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr in ("loads", "load")
                    and isinstance(node.value, ast.Name)
                ):
                    assert node.value.id not in ("pickle", "cloudpickle", "dill"), (
                        f"{path.relative_to(ROOT)}:{node.lineno}"
                    )
