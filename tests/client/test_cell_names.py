"""The user's lines in a notebook: by the number of the cell, as Jupyter shows them."""

import sys
from types import SimpleNamespace

import pytest

from cstorch._internal.tracing.provenance import line_of_function

CELL = "/tmp/ipykernel_17/4057.py"


def test_a_line_is_that_of_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {CELL: 4}

    def format_code_name(file: str) -> tuple[str, str] | None:
        return ("Cell", f"In[{numbers[file]}]") if file in numbers else None

    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=format_code_name))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    names: dict[str, object] = {}
    exec(compile("\ndef step(): pass", CELL, "exec"), names)
    step = names["step"]
    assert callable(step)
    assert line_of_function(step) == "In[4]:2"
    numbers[CELL] = 11  # the same cell, run again
    assert line_of_function(step) == "In[11]:2"
    assert line_of_function(test_a_line_is_that_of_its_cell).startswith("tests/client/test_cell_names.py:")
