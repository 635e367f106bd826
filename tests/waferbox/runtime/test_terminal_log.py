"""What processes of the cluster say on standard error, and the variable that says how much."""

import subprocess
import sys

import pytest

from waferbox import settings

SCRIPT = """
import logging
from waferbox.runtime.logs import set_up_logging
set_up_logging()
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append(record.levelname)
logging.getLogger().addHandler(Keep())
for name in ("wafer.wafer_job", "elsewhere"):
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger(name).log(level, "it is said")
print(*records)
"""


def run(level: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PATH": ""} | ({settings.LOG_LEVEL.name: level} if level else {}),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("", ["wafer.wafer_job INFO", "wafer.wafer_job WARNING", "elsewhere WARNING"]),
        ("warning", ["wafer.wafer_job WARNING", "elsewhere WARNING"]),
        ("Debug", ["wafer.wafer_job DEBUG", "wafer.wafer_job INFO", "wafer.wafer_job WARNING", "elsewhere WARNING"]),
    ],
)
def test_the_terminal_has_what_was_asked_for_and_other_handlers_at_least_info(level: str, said: list[str]) -> None:
    done = run(level)
    lines = done.stderr.splitlines()
    assert [" ".join(line.split(": it is said")[0].split()[3:]) for line in lines] == said
    assert {"INFO", "WARNING"} <= set(done.stdout.split())


def test_a_level_that_there_is_not_is_named() -> None:
    done = run("loud")
    assert done.returncode != 0
    assert "WAFERBOX_LOG_LEVEL must be one of debug, info, warning, error and critical, not 'loud'" in done.stderr
    assert "Traceback" not in done.stderr
