"""Settings and fixtures of all tests."""

import asyncio
import contextvars
import gc
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from slow_threads import slow_down

SLOW_THREADS_VARIABLE = "WAFERBOX_SLOW_THREADS"  # a seed, with which threads sleep now and then

# A shell starts background commands with SIGINT ignored, which all processes of the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the time of an example depends on the load of the machine.
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")

# `make races`: rare orders of the actions of threads become common.
if SLOW_THREADS_VARIABLE in os.environ:
    slow_down(int(os.environ[SLOW_THREADS_VARIABLE]))

# The objects of the collection stay, and are frozen: to search them takes a second in each of many garbage collections.
gc.disable()


def pytest_collection_finish() -> None:
    from waferbox.host.memory import collect_seldom

    gc.freeze()
    gc.enable()
    collect_seldom()  # as in a coordinator: most tests compile
    # pytest attaches six handlers in each test to every logger that does not propagate, and torch has fifty of these.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch"):
            logging.getLogger(name).propagate = True


@pytest.fixture(autouse=True, scope="session")
def clusters_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gives the clusters of the tests a secret and a folder of records of their own, for all processes of the tests.

    Else a script of a test would use a cluster of `waferbox up` that runs on this machine.
    """
    os.environ["WAFERBOX_SECRET_FILE"] = str(tmp_path_factory.mktemp("secret") / "cluster.key")
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("records"))


@pytest.fixture(autouse=True, scope="session")
def ended_loops() -> Iterator[None]:
    """Drops what gRPC still has for an event loop that has ended.

    The loops of a process share one queue of gRPC's. An error for one of them would hold up the events of the others.
    Processes of a cluster have one loop, but tests have those of several in one process.
    """
    call_soon = asyncio.BaseEventLoop.call_soon_threadsafe

    def call_unless_ended(
        self: asyncio.BaseEventLoop, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        try:
            return call_soon(self, callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed() or getattr(callback, "__name__", "") != "_handle_callback_wrapper":
                raise
            return asyncio.Handle(callback, args, self, context)  # which nothing calls

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", call_unless_ended)
        yield


# Imports are in functions, since the process that only distributes the tests needs none of them.
@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Limits torch to one thread: two processes share two cores, and threads of small steps mostly spin."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Resets the client library after each test: no backend, no stateful objects, every setting at its default."""
    yield
    from waferbox.testing.plugin import begin_anew

    begin_anew()


class _Defects(logging.Handler):
    """Keeps the log messages on defects of threads."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(
            f"{record.getMessage()}: {record.exc_info[1]!r}" if record.exc_info else record.getMessage()
        )


@pytest.fixture(autouse=True)
def no_defects(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which a thread has ended by a defect, unless the test has the marker `defects`."""
    defects, logger = _Defects(), logging.getLogger("waferbox.host.threads")
    logger.addHandler(defects)
    yield
    logger.removeHandler(defects)
    if request.node.get_closest_marker("defects") is None:
        assert not defects.messages
