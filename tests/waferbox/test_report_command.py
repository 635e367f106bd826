"""`waferbox compile-report`: from an artifact to a table, JSON and a page."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from appliance.compiler.artifacts import REPORT_DATA, Artifacts
from appliance.compiler.core.target import Target
from waferbox import settings
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module
from waferbox.commands.cli import app
from waferbox.execution_folders import REPORT_PAGE


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the artifact of a product of a batch with a weight, in tmp_path."""
    monkeypatch.setenv(settings.CACHE.name, str(tmp_path / "root"))
    monkeypatch.setenv("COLUMNS", "160")
    builder = GraphBuilder()
    weight = builder.argument(tensor_type((6, 4), torch.float32), state="state.weight")
    batch = builder.argument(tensor_type((8, 6), torch.float32), input="input_0")
    (product,) = builder.op("cirh.MatMul", [batch, weight])
    text = print_module(builder.finish([(product, "output_0")]))
    key, _, _ = Artifacts(tmp_path, tmp_path / "root").compile(text, Target(num_csx=1, num_shards=1))
    return key


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["compile-report", *map(str, arguments)])


def test_table_json_and_page(key: str, tmp_path: Path) -> None:
    for path in (tmp_path / f"{key}.plan", tmp_path / key, tmp_path):
        result = call(path)
        assert result.exit_code == 0, result.output
        assert "24" in result.output
        assert "predicted to take" in result.output
    told = call(tmp_path / key, "--json")
    assert json.loads(told.stdout) == json.loads((tmp_path / key / REPORT_DATA).read_text())
    page = tmp_path / "page.html"
    assert call(tmp_path / key, "--html", page).exit_code == 0
    assert page.read_text() == (tmp_path / key / REPORT_PAGE).read_text()
    assert call(tmp_path / key, "--html", "-").stdout == page.read_text()
    assert "either the page" in call(tmp_path / key, "--html", "-", "--json").stderr


def test_what_is_no_artifact(key: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "name an artifact folder" in call(tmp_path / "empty").stderr
    (tmp_path / f"{key}.plan").write_bytes(b"nothing")
    result = call(tmp_path / key)
    assert result.exit_code == 1
    assert "compile the step again" in result.stderr
    assert call(tmp_path / "absent").exit_code == 2
