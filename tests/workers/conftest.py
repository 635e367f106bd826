"""Fixtures of the tests of workers."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from waferbox import settings
from waferbox.input_process import batches
from waferbox.launch.fork_server_process import ForkServerProcess
from wsc.v1 import node_pb2

sys.path.insert(0, str(Path(__file__).parent))  # for input_functions


@pytest.fixture(autouse=True)
def _nobody_asked_for_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have."""
    monkeypatch.setattr(batches, "_rank_was_asked", lambda: False)
    monkeypatch.setattr(batches, "_share_was_asked", lambda: False)


@pytest.fixture(scope="session")
def fork_server_process() -> Iterator[ForkServerProcess]:
    with closing(ForkServerProcess(["torch"], dict(os.environ))) as server:
        yield server


@pytest.fixture
def forked(fork_server_process: ForkServerProcess, monkeypatch: pytest.MonkeyPatch) -> ForkServerProcess:
    """Forks the processes of input_fns, as a cluster does. Otherwise each would import torch."""
    monkeypatch.setenv(settings.FORK_SERVER.name, fork_server_process.name)
    return fork_server_process


@pytest.fixture
def prepare() -> Callable[..., node_pb2.PrepareInput]:
    """prepare(input_fn, *args, **fields of PrepareInput): the request as the client makes it."""

    def make(input_fn: Callable[..., Any], *args: Any, position: Any = None, **fields: Any) -> node_pb2.PrepareInput:
        state = {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        }
        recipe = {
            "input_fn": input_fn,
            "args": args,
            "kwargs": {},
            "random_state": state,
            "default_dtype": "",
            "position": None,
        }
        if position is not None:
            recipe["position"] = dict(zip(("state", "strict"), position, strict=True))
        request = {
            "builder": cloudpickle.dumps(recipe),
            "interpreter": sys.executable,
            "python_paths": [str(Path(__file__).parent)],
            "num_workers": 1,
            "num_csx": 1,
            **fields,
        }
        for name in ("interpreter", "working_directory"):
            request[name] = os.fsencode(request.get(name, ""))
        for name in ("python_paths", "last_python_paths", "interpreter_python_paths", "mount_dirs"):
            request[name] = [os.fsencode(path) for path in request.get(name, ())]
        return node_pb2.PrepareInput(**request)

    return make
