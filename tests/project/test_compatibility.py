"""docs/compatibility.md says what the code has, and absent names say so themselves."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch

import cstorch
from cstorch.errors import AbsentError

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import compatibility  # noqa: E402  from docs


def test_the_committed_page_is_current() -> None:
    text = (DOCS / "compatibility.md").read_text()
    assert text == compatibility.page(), "stale: run `python docs/compatibility.py`"


def test_each_status_occurs_where_it_must() -> None:
    status = {(module, name): (status, remark) for module, name, status, remark in compatibility.rows()}
    assert status["cerebras.pytorch", "trace"] == ("same", "")
    assert status["cerebras.pytorch.optim", "AdamW"] == ("same", "")
    assert status["cerebras.pytorch", "backend"][0] == "differs"
    assert status["cerebras.pytorch.backends.csx.precision", "optimization_level"] == ("same", "")
    assert status["cerebras.pytorch.mesh", "Shard"][0] == "absent"
    assert status["cerebras_pytorch.experimental", "configure"][0] == "differs"


@pytest.mark.parametrize(
    ("reference", "deviations"),
    [
        (["a", "b=2", "*args", "c=3.0"], ""),
        (["a", "b=2", "*", "c=3", "d=None"], "does not take `d`"),
        (["a", "b=None"], "`b` is 2, not None by default"),
        (["a=1"], "`a` is needed, not 1 by default"),
        (["a", "*", "c"], ""),
        (["c", "a"], "by name only: `c`"),
        (["b", "a"], "takes `a`, `b` in this order"),
        (["a", "**kwargs"], "takes no names but its own"),
        (["e=torch.float32"], ""),
        (["e=torch.float16"], "`e` is torch.float32, not torch.float16 by default"),
        (["c=<default>", ".first", ".second", ".third"], "by name only: all; has no `third`"),
    ],
)
def test_signatures_are_compared(reference: list[str], deviations: str) -> None:
    class Sample:
        def __init__(self, a: int, b: int = 2, e: torch.dtype = torch.float32, *, c: float = 3) -> None:
            self.first = a

        def second(self) -> None:
            pass

    assert compatibility._deviations(Sample, reference) == deviations


def test_kinds_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = compatibility._facts
    monkeypatch.setattr(
        compatibility,
        "_facts",
        lambda name: {"class": ["cerebras.pytorch.trace"]} if name == "reference_kinds" else facts(name),
    )
    rows = {(module, name): remark for module, name, _, remark in compatibility.rows()}
    assert rows["cerebras.pytorch", "trace"] == "a function, not a class"


def test_differences_are_of_names_that_there_are() -> None:
    present = {(module, name) for module, name, status, _ in compatibility.rows() if status != "absent"}
    differences = tomllib.loads((DOCS / "differences.toml").read_text())
    noted = {(module, name) for module, names in differences.items() for name in names}
    assert noted <= present


def test_asking_for_an_absent_name_gives_the_remark() -> None:
    for module, name, status, remark in compatibility.rows():
        if status != "absent":
            continue
        with pytest.raises((AbsentError, ImportError)) as caught:
            getattr(compatibility._holder(module), name)
        assert remark in str(caught.value), f"{module}.{name}"


def test_importing_an_absent_name_gives_the_remark_under_every_import_name() -> None:
    for module, name, status, remark in compatibility.rows():
        if status != "absent":
            continue
        names = [module]
        if module.startswith("cerebras.pytorch"):
            names.append(module.replace("cerebras.pytorch", "cstorch", 1))
        if module.startswith("cerebras_torch"):
            names.append(module.replace("cerebras_torch", "cerebras.framework.torch", 1))
        for known in names:
            with pytest.raises(ImportError) as caught:
                exec(f"from {known} import {name}")
            assert remark in str(caught.value), f"{known}.{name}"


@pytest.mark.parametrize(
    "name",
    [
        "cstorch",
        "cerebras_pytorch",
        "cerebras_torch",
        "cerebras_pytorch.experimental",
        "cerebras.pytorch.amp",
        "cerebras.pytorch.optim.lr_scheduler",
        "cerebras.pytorch.utils",
        "cerebras.pytorch.utils.data",
        "cerebras_pytorch.metrics",
        "cerebras_pytorch.utils.tracker",
    ],
)
def test_a_name_of_nobody_is_a_plain_error(name: str) -> None:
    module = import_module(name)
    with pytest.raises(AttributeError, match="no_such_name") as caught:
        _ = module.no_such_name
    assert not isinstance(caught.value, AbsentError)
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec(f"from {name} import no_such_name")
    assert not hasattr(cstorch.optim, "_private")
    assert not hasattr(cstorch, "mesh")


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("from cerebras.pytorch import mesh", "placed by the compiler"),
        ("from cerebras.pytorch.profiler import ProfilerRegistry", "compile report"),
        ("from cerebras_pytorch.experimental.utils.nest import serialize_visit_fns", "visit functions stay"),
        ("from cerebras_pytorch.amp import float_function", "compiler inserts casts"),
        ("from cerebras_pytorch.experimental.utils.data import is_bf16", "tensor.float"),
        ("from cerebras.pytorch import configure", "release 1.8"),
        ("from cerebras.framework.torch.core import tensor", "leave it out"),
    ],
)
def test_importing_an_absent_name_says_what_to_do(statement: str, text: str) -> None:
    with pytest.raises(ImportError, match=text):
        exec(statement)


@pytest.mark.cluster
def test_the_script_writes_the_page(tmp_path: Path) -> None:
    names = ("compatibility.py", "name_uses.py", *(path.name for path in DOCS.glob("*.toml")))
    for name in names:
        (tmp_path / name).write_bytes((DOCS / name).read_bytes())
    subprocess.run([sys.executable, str(tmp_path / "compatibility.py")], check=True, timeout=60)
    assert (tmp_path / "compatibility.md").read_text() == (DOCS / "compatibility.md").read_text()
