"""Every test begins without a backend, and without stateful objects of the tests before it."""

from collections.abc import Iterator

import pytest

from cstorch import backends, state
from cstorch.backend import close_backend


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    yield
    close_backend()
    state.clear()
    backends.reset()
