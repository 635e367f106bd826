"""What an input_fn prints reaches the log: whole lines, soon, and not more than anybody can read."""

import logging
import queue
import re

import input_functions
import pytest
from test_workers_input_process import Prepare, running

from workers.output import LINE_CHARACTERS, LINES_A_SECOND, ConsoleReader

pytestmark = pytest.mark.cluster


def test_all_that_is_printed(prepare: Prepare, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="workers.input_fn")
    with running(prepare(input_functions.printing, 4)) as harness:
        assert harness.batch() == [0, 1, 2, 3]
        assert "made by print" in caplog.messages  # not only at the end
    lines = caplog.messages
    assert lines[:2] == ["made by print", "a warning of mine"]
    assert lines[2:5] == ["\N{REPLACEMENT CHARACTER} not text", "50%", "100%"]
    assert lines[5] == "x" * LINE_CHARACTERS + "…"
    assert lines[6:9] == ["0", "1", "2"]
    counts = [int(found[1]) for line in lines if (found := re.match(r"(\d+) lines more were printed", line))]
    shown = sum(line.isdecimal() for line in lines)
    assert shown + sum(counts) == 20_000
    assert shown <= LINES_A_SECOND * (len(counts) + 1)
    assert lines[-1] == "unfinished"


@pytest.mark.defects
def test_a_defect_in_the_thread_that_reads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process of the input_fn would wait for ever to print."""

    def fail(reader: ConsoleReader) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(ConsoleReader, "_run", fail)
    told: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    reader = ConsoleReader(told.put)
    assert str(told.get(timeout=10)) == "oh"
    reader.close_writer()
    reader.close()
