"""The command line of a shard."""

import re
from pathlib import Path

import pytest

from memoryx.settings import parse_arguments
from waferbox.host.memory import parse_size

NEEDED = ["--management", "a:1"]


def test_a_folder_and_a_limit(tmp_path: Path) -> None:
    settings, states = parse_arguments(
        [*NEEDED, "--threads", "2", "--state-dir", str(tmp_path), "--memory-limit", "2g"]
    )
    assert settings.threads == 2
    assert (states.folder, states.limit_bytes) == (tmp_path, 2 << 30)
    assert parse_arguments(NEEDED)[1].folder is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--memory-limit", "1g"], "--memory-limit needs a --state-dir"),
        (["--state-dir", "/nowhere"], "must be a folder on a disk that can be written.*No such file"),
        (["--state-dir", "/dev/shm"], "in memory"),
        (["--state-dir", ".", "--memory-limit", "much"], "such as 512m or 8g"),
    ],
)
def test_what_cannot_be_used_is_refused(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([*NEEDED, *arguments])
    assert re.search(reason, capsys.readouterr().err.replace("\n", " "))


def test_sizes() -> None:
    assert [parse_size(text) for text in ("100", "4k", "512m", "8G", "1tb")] == [100, 4096, 512 << 20, 8 << 30, 1 << 40]
    for text in ("", "0", "-1m", "1.5g", "g", "1 x"):
        with pytest.raises(ValueError, match="a size is"):
            parse_size(text)
