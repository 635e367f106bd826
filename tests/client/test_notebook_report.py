"""An executor in a notebook: the compile report of its last loop, in a frame of its own."""

import os
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch
from cstorch._internal.notebook import inline_report
from waferbox.execution_folders import RECORD, REPORT_PAGE, ExecutionRecord, Stage

PAGE = "<!DOCTYPE html>\n<title>a \"b\" 'c' &amp; {d}</title></iframe><script>alert(1)</script>"


class Elements(HTMLParser):
    """The elements of a text, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def write_record(folder: Path, plan: str) -> None:
    record = ExecutionRecord(
        stage=Stage.TRAIN, function="step", model="", loader="samples", steps=1, rows=4, num_csx=1, plan=plan
    )
    (folder / RECORD).write_text(record.text())


def test_the_page_is_in_a_frame_in_which_no_script_runs(tmp_path: Path) -> None:
    write_record(tmp_path, str(tmp_path / "0123.plan"))
    (tmp_path / "0123").mkdir()
    (tmp_path / "0123" / REPORT_PAGE).write_text(PAGE)
    html = inline_report(tmp_path)
    assert html is not None
    ((tag, attributes),) = Elements(html).found
    assert tag == "iframe"
    assert attributes["srcdoc"] == PAGE
    assert attributes["sandbox"] is None  # an empty list of rights
    assert "sandbox" in attributes


def test_a_page_on_another_host_is_named(tmp_path: Path) -> None:
    write_record(tmp_path, "/cache/<b>/0123.plan")
    html = inline_report(tmp_path)
    assert html is not None
    assert f"/cache/&lt;b&gt;/0123/{REPORT_PAGE}" in html
    assert "waferbox page" in html


def test_a_step_that_is_not_compiled_has_none(tmp_path: Path) -> None:
    assert inline_report(tmp_path) is None
    write_record(tmp_path, "")
    assert inline_report(tmp_path) is None


def samples() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)


def test_an_executor_shows_that_of_its_last_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cstorch.backend("CPU", artifact_dir="logs")
    executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(samples), num_steps=1)
    assert executor._repr_html_() is None
    for _ in executor:
        pass
    assert executor._repr_html_() is None  # nothing is compiled on the CPU
    write_record(executor.artifact_dir, "/cache/0123.plan")
    (tmp_path / "other").mkdir()
    os.chdir(tmp_path / "other")
    assert REPORT_PAGE in (executor._repr_html_() or "")
