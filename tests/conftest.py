"""What holds for all tests."""

import gc
import logging
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
from slow_threads import slow_down

SLOW_THREADS_VARIABLE = "WAFERBOX_SLOW_THREADS"  # with a seed: threads sleep now and then

# A shell starts what it runs in the background with SIGINT ignored, and so would be all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")

# Rare orders of what threads do become common: `make races`.
if SLOW_THREADS_VARIABLE in os.environ:
    slow_down(int(os.environ[SLOW_THREADS_VARIABLE]))

# What is made while tests are collected stays: looking for garbage there costs a second, and tests look often.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # pytest attaches six handlers in each test to every logger that does not propagate, and torch has fifty of these.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch"):
            logging.getLogger(name).propagate = True


@pytest.fixture(autouse=True, scope="session")
def cluster_secret(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The clusters of the tests have a secret of their own, which all processes that tests start have from here."""
    os.environ["WAFERBOX_SECRET_FILE"] = str(tmp_path_factory.mktemp("secret") / "cluster.key")


# Imports are in functions where the process that only hands tests out to others need not wait for them.
@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Two processes share two cores, and at the sizes of tests, threads mostly wait for each other, busily."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Every test begins as a script does: no backend, no stateful objects, every setting at its default."""
    yield
    from cstorch import amp, backends
    from cstorch._internal import state
    from cstorch.backend import close_backend

    close_backend()
    state.clear()
    backends.reset()
    amp.enable_mixed_precision(False)
    amp.set_half_dtype("float16")


class _Defects(logging.Handler):
    """Keeps what threads tell of their defects."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(f"{record.getMessage()}: {record.exc_info[1]!r}" if record.exc_info else record.getMessage())


@pytest.fixture(autouse=True)
def no_defects(request: pytest.FixtureRequest) -> Iterator[None]:
    """A thread that ends by a defect which nobody meant fails the test, whoever else has noticed."""
    defects, logger = _Defects(), logging.getLogger("waferbox.host.threads")
    logger.addHandler(defects)
    yield
    logger.removeHandler(defects)
    if request.node.get_closest_marker("defects") is None:
        assert not defects.told
