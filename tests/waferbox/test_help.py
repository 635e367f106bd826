"""The help of the command says what it takes."""

import pytest
from typer.testing import CliRunner

from waferbox.commands.cli import app


@pytest.mark.parametrize("command", [["up"], ["logs"], ["opt"], ["compile-report"]])
def test_a_flag_is_not_shown_with_a_value(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0, shown.output
    assert [line for line in shown.output.splitlines() if "bool>" in line and "--help" not in line] == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--memory-limit", "8g"], "needs --state-dir"),
        (["--memory-limit", "plenty", "--state-dir", "."], "such as 512m or 8g"),
        (["--state-dir", "/nowhere"], "does not exist"),
    ],
)
def test_what_memoryx_could_not_use_is_refused_at_once(
    options: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for command in (["up"], ["run", __file__]):
        refused = CliRunner().invoke(app, [command[0], *options, *command[1:]])
        assert refused.exit_code == 2
        assert reason in refused.output
