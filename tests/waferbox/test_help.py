"""The help of the command says what it takes."""

import pytest
from typer.testing import CliRunner

from waferbox.cli import app


@pytest.mark.parametrize("command", [["up"], ["logs"], ["opt"], ["compile-report"]])
def test_a_flag_is_not_shown_with_a_value(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0, shown.output
    assert [line for line in shown.output.splitlines() if "bool>" in line and "--help" not in line] == []
