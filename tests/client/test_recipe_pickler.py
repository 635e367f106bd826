"""What workers run is pickled so that they need not import what only the script has, and show the user's own lines."""

import functools
import importlib
import importlib.util
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from cstorch.utils.data.dataloader import pickled_recipe


def of_a_script(text: str) -> Callable[[], Any]:
    """The function `input_fn` of a script that ran: it is pickled whole, as there is no module to import."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "/somewhere/train.py", "exec"), names)
    function: Callable[[], Any] = names["input_fn"]
    return function


def files_of_failure(function: Callable[[], Any]) -> list[tuple[str, int | None]]:
    with pytest.raises(ValueError, match="not a picture") as caught:
        function()
    return [(frame.filename, frame.lineno) for frame in traceback.extract_tb(caught.value.__traceback__)][1:]


def test_code_keeps_the_name_of_its_file() -> None:
    script = """
class Pictures:
    def decode(self):
        check = lambda: int("not a picture")
        return check()

def input_fn():
    return Pictures().decode()
"""
    sent = cloudpickle.loads(pickled_recipe({"input_fn": of_a_script(script)}))["input_fn"]
    assert files_of_failure(sent) == [("/somewhere/train.py", line) for line in (8, 5, 4)]


def test_what_a_module_has_is_imported() -> None:
    assert cloudpickle.loads(pickled_recipe(traceback.extract_tb)) is traceback.extract_tb


def test_a_script_in_a_spawned_process_is_pickled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__mp_main__")  # as multiprocessing makes it
    exec("class Numbers:\n    size = 3\n\ndef input_fn():\n    return Numbers.size", vars(script))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "__main__", script)
        patch.setitem(sys.modules, "__mp_main__", script)
        pickled = pickled_recipe([vars(script)["input_fn"], vars(script)["Numbers"]])
    input_fn, numbers = cloudpickle.loads(pickled)  # in a process with another script
    assert (input_fn(), numbers.size) == (3, 3)


def test_the_name_of_a_spawned_script_may_be_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__mp_main__", ModuleType("another_name"))
    assert pickled_recipe(1)


SIZES = """
SIZE = 3

class Numbers:
    size = SIZE

def input_fn():
    return Numbers.size
"""


def forget_modules() -> None:
    """Drops the modules of a test, as in a process that has not imported them."""
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def modules_of_one_test() -> Iterator[None]:
    yield
    forget_modules()


def from_a_file(folder: Path) -> ModuleType:
    """As the documentation of importlib has it: of a file whose name nothing could import."""
    (folder / "sizes-1.py").write_text(SIZES)
    spec = importlib.util.spec_from_file_location("my_sizes", folder / "sizes-1.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["my_sizes"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_a_dropped_folder(folder: Path, package: str = "") -> ModuleType:
    """From a folder that is on the search path no more, alone or within a package."""
    within = folder / package
    within.mkdir(exist_ok=True)
    (within / "my_sizes.py").write_text(SIZES)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{package}.my_sizes".strip("."))
    finally:
        sys.path.remove(str(folder))


def made_of_text(folder: Path) -> ModuleType:
    sys.modules["my_sizes"] = module = ModuleType("my_sizes")
    exec(SIZES, vars(module))
    return module


@pytest.mark.parametrize(
    "make",
    [from_a_file, of_a_dropped_folder, functools.partial(of_a_dropped_folder, package="my_package"), made_of_text],
)
def test_a_module_that_only_the_script_has_is_pickled_whole(make: Any, tmp_path: Path) -> None:
    module = make(tmp_path)
    pickled = pickled_recipe([module.input_fn, module.Numbers])
    assert module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    forget_modules()
    input_fn, numbers = cloudpickle.loads(pickled)
    assert (input_fn(), numbers.size) == (3, 3)


def test_what_runpy_runs_is_pickled_whole(tmp_path: Path) -> None:
    tmp_path.joinpath("run.py").write_text(
        SIZES + "from cstorch.utils.data.dataloader import pickled_recipe\npickled = pickled_recipe(input_fn)\n"
    )
    pickled = runpy.run_path(str(tmp_path / "run.py"))["pickled"]
    assert cloudpickle.loads(pickled)() == 3


@pytest.mark.parametrize("place", ["", "folder"])
def test_what_can_be_imported_is_imported(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "my_sizes.py").write_text(SIZES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(place)  # relative to the working folder
    module = importlib.import_module("my_sizes")
    assert cloudpickle.loads(pickled_recipe(module.input_fn)) is module.input_fn


def test_all_modules_of_this_process_can_be_imported() -> None:
    code = (
        "import sys\nimport cerebras.pytorch, numpy, torch._dynamo, torch.distributed.tensor, yaml\n"
        "from cstorch._internal.importable_modules import can_be_imported\n"
        "modules = [module for name, module in [*sys.modules.items()] if vars(module).get('__name__') == name]\n"
        "print([module.__name__ for module in modules if not can_be_imported(module)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "['_remote_module_non_scriptable']"  # which torch writes and imports
