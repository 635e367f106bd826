"""What workers run is pickled so that a traceback there shows the user's own lines."""

import sys
import traceback
from collections.abc import Callable
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
    monkeypatch.setattr(cloudpickle.cloudpickle, "_PICKLE_BY_VALUE_MODULES", set())
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
