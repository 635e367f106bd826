"""The table of environment variables: it has all of them, and a wrong value is refused by name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from waferbox import settings
from waferbox.input_process.confinement import DROPPED_VARIABLES
from waferbox.rpc.server import make_server

ROOT = Path(__file__).parents[2]
PRODUCT = ("appliance", "client", "memoryx", "swarmx", "vendor_gateway", "wafer", "waferbox", "workers")
NAME = re.compile(r"WAFERBOX_[A-Z]+(?:_[A-Z]+)*")
KNOWN = {variable.name for variable in settings.VARIABLES}


def product_files() -> Iterator[Path]:
    for folder in PRODUCT:
        yield from (ROOT / folder).rglob("*.py")


def test_every_variable_is_in_the_table() -> None:
    for file in product_files():
        unknown = set(NAME.findall(file.read_text())) - KNOWN
        assert not unknown, f"{file}: {unknown}"


def test_only_the_process_of_an_input_fn_writes_names_itself() -> None:
    allowed = {ROOT / "waferbox" / "settings.py", *(ROOT / "waferbox" / "input_process").glob("*.py")}
    for file in set(product_files()) - allowed:
        assert not re.search(r"""["']WAFERBOX_[A-Z_]+["']""", file.read_text()), file


def test_the_process_of_an_input_fn_drops_what_is_withheld() -> None:
    assert set(DROPPED_VARIABLES) == {variable.name for variable in settings.VARIABLES if variable.is_withheld}


@pytest.mark.parametrize("variable", settings.VARIABLES, ids=lambda variable: variable.name)
@pytest.mark.parametrize("text", [None, ""])
def test_without_a_text_a_variable_has_its_default(
    variable: settings.Variable[object], text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is None:
        monkeypatch.delenv(variable.name, raising=False)
    else:
        monkeypatch.setenv(variable.name, text)
    assert not variable.is_set()
    assert variable.get() == variable.default


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (settings.HANG_SECONDS, "0"),
        (settings.HANG_SECONDS, "soon"),
        (settings.KEEPALIVE_SECONDS, "nan"),
        (settings.RECOVERY_SECONDS, "-1"),
        (settings.LOG_LEVEL, "loud"),
        (settings.LANE, "pigeon"),
        (settings.RUN_AHEAD_STEPS, "1.5"),
        (settings.RUN_AHEAD_STEPS, "65537"),
        (settings.RUN_AHEAD_STEPS, "9" * 5000),
        (settings.KEEPALIVE_SECONDS, "inf"),
        (settings.KEEPALIVE_SECONDS, "1000001"),
        (settings.HANG_SECONDS, "inf"),
        (settings.IDLE_SECONDS, "1e300"),
        (settings.REPLACEMENT_SECONDS, "inf"),
        (settings.RECOVERY_SECONDS, "inf"),
        (settings.MIN_NUM_CSX, "1025"),
        (settings.EXECUTION_STRATEGY, "fast"),
        (settings.MAX_NUM_RESTARTS, "1000001"),
        (settings.MIN_NUM_CSX, "0"),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    variable: settings.Variable[object], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ValueError, match=f"{variable.name} must be .*, not {text!r}"):
        variable.get()


def test_all_variables_are_checked_before_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.check()
    monkeypatch.setenv(settings.HANG_SECONDS.name, "0")
    with pytest.raises(settings.SettingError, match=f"{settings.HANG_SECONDS.name} must be .*, not '0'"):
        settings.check()


NUMBERS = [each for each in settings.VARIABLES if type(each.default) in (int, float) and not each.is_internal]


@pytest.mark.parametrize("variable", NUMBERS, ids=lambda variable: variable.name)
def test_every_number_has_a_limit(variable: settings.Variable[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and waits of the system have one."""
    monkeypatch.setenv(variable.name, str(2**63))
    with pytest.raises(settings.SettingError, match=f"{variable.name} must be "):
        variable.get()


@pytest.mark.parametrize("seconds", ["1000000", "0.001"])
def test_grpc_takes_every_time_of_keepalive(monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv(settings.KEEPALIVE_SECONDS.name, seconds)
    server = make_server()
    server.add_insecure_port("127.0.0.1:0")
    server.start()
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (settings.RECOVERY_SECONDS, "0", 0.0),
        (settings.LOG_LEVEL, "Debug", 10),
        (settings.TOKEN, " t\n", "t"),
        (settings.STRICT, "1", True),
        (settings.STRICT, "yes", False),
        (settings.MIN_NUM_CSX, "2", 2),
        (settings.CACHE, "cache", Path.cwd() / "cache"),
    ],
)
def test_a_text_becomes_a_value(
    variable: settings.Variable[object], text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, text)
    assert variable.is_set()
    assert variable.get() == value
