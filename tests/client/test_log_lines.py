"""Each log line of ours is shown once, however and whenever the script sets up logging."""

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest

import cstorch

logger = logging.getLogger("cstorch.session")


@contextmanager
def standard_error() -> Iterator[Callable[[], list[str]]]:
    """Logging as in a new process, without the handlers that pytest adds for each test; gives what shows the lines."""
    root, own = logging.getLogger(), logging.getLogger("cstorch")
    before = root.handlers[:], own.handlers[:], own.level
    root.handlers.clear()
    own.handlers.clear()
    text = io.StringIO()
    try:
        with redirect_stderr(text):
            yield lambda: [line.rpartition(" ")[2] for line in text.getvalue().splitlines()]
    finally:
        root.handlers[:], own.handlers[:], own.level = before


def test_a_script_without_logging_sees_our_lines() -> None:
    with standard_error() as shown:
        cstorch.backend("CPU")
        logger.info("line")
        logger.debug("detail")
        assert shown() == ["line"]


def test_a_notebook_shows_only_warnings_as_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=lambda file: None), set_custom_exc=lambda *_: None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with standard_error() as shown, redirect_stdout(io.StringIO()) as output:
        cstorch.backend("CPU")
        logger.info("line")
        logger.warning("warning")
        logger.info("another")
        assert shown() == ["warning"]
        assert [line.rpartition(" ")[2] for line in output.getvalue().splitlines()] == ["line", "another"]


@pytest.mark.parametrize("is_first", [True, False], ids=["before the backend", "after the backend"])
def test_a_script_that_sets_up_logging_sees_each_line_once(is_first: bool) -> None:
    with standard_error() as shown:
        if is_first:
            logging.basicConfig()
        cstorch.backend("CPU")
        if not is_first:
            logging.basicConfig()
        logger.info("line")
        assert shown() == ["INFO:cstorch.session:line"]


def test_a_handler_that_comes_and_goes() -> None:
    with standard_error() as shown:
        cstorch.backend("CPU")
        logger.info("first")
        logging.basicConfig()
        logger.info("second")
        logging.getLogger().handlers.clear()
        logger.info("third")
        assert shown() == ["first", "INFO:cstorch.session:second", "third"]


def test_a_handler_of_our_logger_counts_too() -> None:
    with standard_error() as shown:
        cstorch.backend("CPU")
        taken: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: taken.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("cstorch").addHandler(handler)
        logger.info("line")
        assert (taken, shown()) == (["line"], [])


def test_a_handler_that_would_not_show_a_line_leaves_it_to_ours() -> None:
    with standard_error() as shown:
        cstorch.backend("CPU")
        errors = logging.StreamHandler(sys.stderr)
        errors.setLevel(logging.ERROR)
        logging.getLogger().addHandler(errors)
        logging.getLogger().addHandler(logging.NullHandler())
        logger.info("line")
        logger.error("error")
        assert shown() == ["line", "error"]
