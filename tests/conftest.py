"""What holds for all tests."""

import gc
import logging
import signal
from collections.abc import Iterator

import pytest
import torch

from cstorch import amp, backends, state
from cstorch.backend import close_backend

# A shell starts what it runs in the background with SIGINT ignored, and so would be all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Two processes share two cores, and at the sizes of tests, threads mostly wait for each other, busily.
torch.set_num_threads(1)

# What is made while tests are collected stays: looking for garbage there again and again costs a second and more.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    # pytest attaches six handlers in each test to every logger that does not propagate, and torch has fifty of these.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch"):
            logging.getLogger(name).propagate = True


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Every test begins as a script does: no backend, no stateful objects, every setting at its default."""
    yield
    close_backend()
    state.clear()
    backends.reset()
    amp.enable_mixed_precision(False)
    amp.set_half_dtype("float16")
