"""Imports run one way: no role imports another, nobody imports upwards, and neither modules nor packages form circles.

Imports in functions and under TYPE_CHECKING count.
"""

import ast
import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Which folder a top-level package is in.
FOLDERS = {
    "appliance": "appliance",
    "cerebras": "client/cerebras",
    "cerebras_appliance": "client/cerebras_appliance",
    "cerebras_pytorch": "client/cerebras_pytorch",
    "cerebras_torch": "client/cerebras_torch",
    "cstorch": "client/cstorch",
    "memoryx": "memoryx",
    "swarmx": "swarmx",
    "vendor_gateway": "vendor_gateway",
    "wafer": "wafer",
    "waferbox": "waferbox",
    "workers": "workers",
}

# The packages of `waferbox` are units of their own; "waferbox" is its modules at the top: roles and settings.
RUNTIME = {"waferbox", "waferbox.host", "waferbox.launch", "waferbox.links", "waferbox.rpc", "waferbox.security", "wsc"}
MAY_IMPORT = {
    "appliance": {*RUNTIME, "waferbox.cirh", "waferbox.lair", "waferbox.runtime"},
    "cerebras": {"cerebras_torch", "cstorch"},
    "cerebras_appliance": {"cstorch"},
    "cerebras_pytorch": {"cerebras_appliance", "cerebras_torch", "cstorch"},
    "cerebras_torch": {"cstorch"},
    # No package at the top but waferbox: a user's module may have the name of another.
    "cstorch": {*RUNTIME, "waferbox.checked_run", "waferbox.cirh", "waferbox.input_process"},
    "memoryx": {*RUNTIME, "waferbox.cirh", "waferbox.runtime", "waferbox.states"},
    "swarmx": {*RUNTIME, "waferbox.runtime"},
    "vendor_gateway": {*RUNTIME, "cstorch", "vendor_wire", "waferbox.runtime"},  # towards the cluster it is a client
    "wafer": {*RUNTIME, "waferbox.cirh", "waferbox.lair", "waferbox.runtime", "waferbox.states"},
    "waferbox": {"wsc"},
    "waferbox.__main__": {"waferbox.commands", "waferbox.host", "waferbox.launch"},
    "waferbox.check": {
        *RUNTIME,
        "appliance",
        "waferbox.checked_run",
        "waferbox.cirh",
        "waferbox.output",
        "waferbox.prediction",
    },
    "waferbox.checked_run": set(),
    "waferbox.cirh": {"waferbox", "wsc"},
    "waferbox.cluster": {*RUNTIME, "waferbox.input_process", "waferbox.runtime"},
    "waferbox.commands": {
        *RUNTIME,
        "appliance",
        "waferbox.check",
        "waferbox.cirh",
        "waferbox.cluster",
        "waferbox.kubernetes",
        "waferbox.output",
        "waferbox.prediction",
        "waferbox.ray_engine",
    },
    "waferbox.host": {"waferbox"},
    "waferbox.input_process": set(),  # it runs under interpreters that have no Waferbox
    "waferbox.kubernetes": {"waferbox", "waferbox.host", "waferbox.ray_engine", "waferbox.security"},
    "waferbox.lair": {"waferbox", "waferbox.cirh", "waferbox.host"},
    "waferbox.launch": {"waferbox", "waferbox.host", "waferbox.security"},
    "waferbox.links": {"waferbox", "waferbox.host", "waferbox.rpc", "waferbox.security", "wsc"},
    "waferbox.output": {"waferbox", "waferbox.host", "wsc"},
    "waferbox.prediction": {
        "appliance",
        "waferbox",
        "waferbox.cirh",
        "waferbox.lair",
        "waferbox.output",
        "waferbox.runtime",
        "wsc",
    },
    "waferbox.testing": {"cstorch", "waferbox", "waferbox.cluster", "waferbox.launch"},
    "waferbox.ray_engine": {*RUNTIME, "appliance", "waferbox.cluster", "waferbox.runtime"},
    "waferbox.rpc": {"waferbox", "waferbox.host", "waferbox.security"},
    "waferbox.runtime": RUNTIME,
    "waferbox.security": {"waferbox", "waferbox.host"},
    "waferbox.states": {*RUNTIME, "waferbox.cirh", "waferbox.lair", "waferbox.runtime"},
    "workers": {*RUNTIME, "waferbox.input_process", "waferbox.runtime"},
}


# Of the client, from the lowest; all else of cstorch is the API, above them. An entry holds for packages below it.
CLIENT_LAYERS = (
    {"cstorch", "cstorch._internal"},  # the modules at these levels: errors, state, the interface of an execution
    {"cstorch.backends", "cstorch.distributed"},
    {"cstorch._internal.tracing"},
    {"cstorch._internal.check"},
    {"cstorch._internal.lowering"},
    {"cstorch._internal.session"},
    {"cstorch._internal.backend"},
    {"cstorch._internal.checked_backend"},
)
# Packages of the insides that stand on the API.
ABOVE_THE_LAYERS = ("cstorch._internal.checkpoint_files",)

Graph = Mapping[str, set[str]]


@cache
def sources() -> Mapping[str, Path]:
    """The file of each module; a package itself is called `package.__init__`."""
    modules = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            modules[".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))] = path
    return modules


def parsed(text: str) -> ast.Module:
    """Without garbage collection: CPython 3.11 raises SystemError where a finalizer has anything parsed meanwhile."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def imported_names(text: str, module: str) -> Iterator[str]:
    """What a module imports, wherever in it: `a.b.c` for `from a.b import c`, which may be a module or not.

    Only the child of a worker, which has another name under the user's interpreter, imports from its own folder.
    """
    for node in ast.walk(parsed(text)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(imported), names=names, level=0):
                yield from (f"{imported}.{alias.name}" for alias in names)
            case ast.ImportFrom(module=str(imported), names=names, level=1) if module.startswith(
                "waferbox.input_process."
            ):
                folder = module.rpartition(".")[0]
                yield from (f"{folder}.{imported}.{alias.name}" for alias in names)
            case ast.ImportFrom():
                raise AssertionError("imports are absolute")
            case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(name))]):
                yield name


def module_graph(modules: Mapping[str, str]) -> Graph:
    """Which modules each one imports.

    Args:
        modules: their texts by name.
    """

    def found(name: str) -> str | None:
        parent = name.rpartition(".")[0]
        known = (name, f"{name}.__init__", parent, f"{parent}.__init__")
        return next((candidate for candidate in known if candidate in modules), None)

    return {
        module: {target for name in imported_names(text, module) if (target := found(name)) is not None} - {module}
        for module, text in modules.items()
    }


def package_of(module: str) -> str:
    """The folder that a module is in; `__init__` and `__main__` see it from above, and stand by themselves."""
    package, _, name = module.rpartition(".")
    return module if name in ("__init__", "__main__") else package


def package_graph(modules: Graph) -> Graph:
    """The same between packages."""
    packages: dict[str, set[str]] = {}
    for module, targets in modules.items():
        package = package_of(module)
        packages.setdefault(package, set()).update(map(package_of, targets))
        packages[package].discard(package)
    return packages


def circle(graph: Graph) -> list[str]:
    """The nodes along a circle, each of which the next one imports; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@cache
def project() -> Graph:
    return module_graph({module: path.read_text() for module, path in sources().items()})


def layer_of(module: str) -> int:
    """The layer of a module of the client, from 0."""
    package = package_of(module)
    layers = {name: layer for layer, names in enumerate(CLIENT_LAYERS) for name in names}
    if package in ("cstorch", "cstorch._internal", "cstorch._internal.__init__"):
        return layers[package.removesuffix(".__init__")]
    parts = package.split(".")
    if package.startswith(ABOVE_THE_LAYERS):
        return len(CLIENT_LAYERS)
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 1, -1)]
    return next((layers[prefix] for prefix in prefixes if prefix in layers), len(CLIENT_LAYERS))


def unit_of(name: str) -> str:
    """The key of MAY_IMPORT for a module, or for what is imported from one."""
    parts = name.split(".")
    if parts[0] != "waferbox":
        return parts[0]
    inner = ".".join(parts[:2])
    return inner if inner in MAY_IMPORT else "waferbox"


@pytest.mark.parametrize("unit", MAY_IMPORT)
def test_imports_run_one_way(unit: str) -> None:
    known = MAY_IMPORT.keys() | {"vendor_wire", "wsc"}
    for module, path in sources().items():
        if unit_of(module) == unit:
            imported = {unit_of(name) for name in imported_names(path.read_text(), module)} & known
            extra = imported - MAY_IMPORT[unit] - {unit}
            assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(project()) == []


def test_no_packages_import_each_other_in_a_circle() -> None:
    assert circle(package_graph(project())) == []


def test_the_layers_of_the_client() -> None:
    for module, targets in project().items():
        if module.startswith("cstorch."):
            above = [name for name in targets if name.startswith("cstorch.") and layer_of(name) > layer_of(module)]
            assert not above, f"{module} imports {above} from above"


IN_A_FUNCTION = "def f() -> None:\n    from a.two import x\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import two\n"


@pytest.mark.parametrize("first", ["import a.two", "from a.two import x", IN_A_FUNCTION, FOR_TYPES])
def test_a_circle_of_modules_is_found(first: str) -> None:
    modules = {"a.__init__": "", "a.one": first, "a.two": "import os\nfrom a.three import y", "a.three": "import a.one"}
    found = circle(module_graph(modules))
    assert len(found) == 4
    assert set(found) == {"a.one", "a.two", "a.three"}
    assert circle(package_graph(module_graph(modules))) == []  # all in one package
    assert circle(module_graph({**modules, "a.three": "import os"})) == []


def test_a_circle_of_packages_is_found_where_modules_have_none() -> None:
    modules = {
        "a.__init__": "from a.low import x",
        "a.low": "",
        "a.high": "from a.b.thing import y",
        "a.b.__init__": "",
        "a.b.thing": "from a import low",
    }
    graph = module_graph(modules)
    assert circle(graph) == []
    assert set(circle(package_graph(graph))) == {"a", "a.b"}
    del modules["a.high"]
    assert circle(package_graph(module_graph(modules))) == []


def test_a_package_stands_by_itself() -> None:
    modules = {"a.__init__": "from a.one import x", "a.one": "from a import y"}
    assert set(circle(module_graph(modules))) == {"a.__init__", "a.one"}
    assert set(circle(package_graph(module_graph(modules)))) == {"a.__init__", "a"}


def test_only_the_child_of_a_worker_unpickles() -> None:
    allowed = {"waferbox/input_process/loader.py"}
    for path in sources().values():
        if str(path.relative_to(ROOT)) in allowed:
            continue
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("loads", "load") and isinstance(node.value, ast.Name):
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert node.value.id not in ("pickle", "cloudpickle", "dill"), where


def test_modules_of_tests_have_names_of_their_own() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == [], "pytest imports one of them for both"
