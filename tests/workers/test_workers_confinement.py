"""What the process of an input_fn has, and has not, from those that started it."""

import json
import os
import pwd
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import input_functions
import pytest
from link_pairs import raise_defect

from waferbox import settings
from waferbox.cluster.launcher import ForkingLauncher
from waferbox.input_process.confinement import DROPPED_VARIABLES
from waferbox.input_process.messages import BatchLayout, TensorLayout
from waferbox.runtime.node_job import JobFailure
from workers.input_process import InputProcess
from wsc.v1 import node_pb2

pytestmark = pytest.mark.cluster

Prepare = Callable[..., node_pb2.PrepareInput]
LAYOUT = BatchLayout(
    members=(
        TensorLayout(dtype="float32", shape=(4, 3), offset=0),
        TensorLayout(dtype="int64", shape=(4,), offset=64),
    ),
    global_rows=4,
    local_rows=4,
    micro_batches=1,
    slot_bytes=4096,
    num_slots=1,
)
SECRET = "a-secret-token"


def facts(request: node_pb2.PrepareInput, path: Path) -> dict[str, Any]:
    """What an input_fn that describes its process has written down."""
    process = InputProcess(request, raise_defect)
    stop = os.eventfd(0)
    try:
        with os.fdopen(os.memfd_create("ring"), "wb") as ring:
            ring.truncate(4096)
            process.load(LAYOUT, ring.fileno(), [])
            process.request_batch(0, [])
            process.wait_filled(0, stop, lambda step, state: None)
    finally:
        process.close()
        os.close(stop)
    return json.loads(path.read_text())


@pytest.fixture
def fork_server() -> Iterator[None]:
    launcher = ForkingLauncher()
    yield
    launcher.close()


@pytest.fixture(params=["forked", "a Python of its own", "another Python"])
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The input_fn's interpreter, in each way in which its process is started; its environment has secrets."""
    for name in DROPPED_VARIABLES:
        if name not in (settings.INPUT_USER.name, settings.FORK_SERVER.name):
            monkeypatch.setenv(name, SECRET)
    if request.param == "forked":
        request.getfixturevalue("fork_server")
    elif request.param == "another Python":
        program = tmp_path / "python"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        program.chmod(0o755)
        return str(program)
    return sys.executable


def test_it_has_no_token_and_no_descriptor_of_the_worker(prepare: Prepare, interpreter: str, tmp_path: Path) -> None:
    path = tmp_path / "facts"
    with socket.create_server(("127.0.0.1", 0)) as listener, path.open("w") as kept:
        for descriptor in (listener.fileno(), kept.fileno()):
            os.set_inheritable(descriptor, True)
        found = facts(prepare(input_functions.describing_its_process, str(path), interpreter=interpreter), path)
    own_folder = f"{tempfile.gettempdir()}/waferbox-input-"
    targets = [target for target in found["descriptors"].values() if not target.startswith(own_folder)]
    assert len(targets) == len(found["descriptors"]) - 1
    kinds = sorted(target.partition(":")[0] for target in targets)
    assert kinds == ["/dev/null", "/memfd", "pipe", "pipe", "socket"]  # /memfd: itself; pipes: what it prints
    assert not found["environment"].keys() & set(DROPPED_VARIABLES)
    assert SECRET not in found["began_with"].replace(f"WAFERBOX_SECRET_FILE={SECRET}", "").replace(
        f"WAFERBOX_TLS_DIR={SECRET}", ""
    )
    assert found["core"] == [0, 0]
    assert found["no_new_privileges"]


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can start processes of others")
def test_it_is_of_another_user_if_that_is_wished(
    prepare: Prepare, fork_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked, for that user need not be able to read this Python."""
    monkeypatch.setenv(settings.INPUT_USER.name, "nobody")
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # the folders above tmp_path are closed to others, by each new session
        Path(folder).chmod(0o711)
        path = Path(folder) / "facts"
        path.touch()
        path.chmod(0o666)
        found = facts(prepare(input_functions.describing_its_process, str(path)), path)
    nobody = pwd.getpwnam("nobody")
    assert found["users"] == [nobody.pw_uid, nobody.pw_uid, nobody.pw_gid]


@pytest.mark.parametrize(("uid", "user", "reason"), [(0, "no-such-user", "no such user"), (1000, "nobody", "as root")])
def test_a_user_whom_it_cannot_be_of_is_named(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, uid: int, user: str, reason: str
) -> None:
    monkeypatch.setenv(settings.INPUT_USER.name, user)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    with pytest.raises(JobFailure, match=reason):
        InputProcess(prepare(input_functions.counting, 4), raise_defect)
