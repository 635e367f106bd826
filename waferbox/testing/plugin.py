"""The pytest plugin: tests of steps on a cluster, which all processes of a run share.

A test that is marked runs with a cluster, and gives its nodes back at its end::

    @pytest.mark.waferbox(wafers=2)
    def test_training():
        train(num_csx=2)  # a script's function, with a cstorch.backend("CSX") of its own

The fixture `csx_backend` is a backend for such a test::

    def test_loss_falls(csx_backend):
        model = cstorch.compile(Model(), csx_backend)

The cluster starts with the first of these tests, with as many wafers as any of them needs, and ends with the run. With
pytest-xdist its jobs queue for the wafers. Where WAFERBOX_MANAGEMENT names a cluster, the tests use that.
"""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from waferbox import deadlines, settings
from waferbox.launch.local_clusters import EMBEDDED, LocalCluster, Starter, local_clusters, runtime_folder, with_name
from waferbox.limits import MAX_NODES

if TYPE_CHECKING:
    from cstorch.backend import Backend

MARKER: Final = "waferbox"
OWNER: Final = "waferbox_owner"  # in the input of a worker of pytest-xdist: the process that distributes the tests

_wafers = pytest.StashKey[int]()
_left_open = pytest.StashKey[str]()  # the test without a marker after which the process has a backend
_process = pytest.StashKey[subprocess.Popen[bytes]]()


# --- Which tests need a cluster ---------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "waferbox(wafers=1): runs with a cluster of at least so many wafers, and gives its nodes back"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Gives a worker of pytest-xdist the process that owns the cluster."""
    node.workerinput[OWNER] = os.getpid()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    for item in items:
        if "csx_backend" in getattr(item, "fixturenames", ()) and item.get_closest_marker(MARKER) is None:
            item.add_marker(pytest.mark.waferbox)
    config.stash[_wafers] = max((_wafers_of(item) or 0 for item in items), default=0)


def _wafers_of(item: pytest.Item) -> int | None:
    """The wafers that a test needs; 0: it needs no cluster; None: its marker is wrong, which fails the test alone."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return 0
    wafers = marker.kwargs.get("wafers", 1)
    if marker.args or marker.kwargs.keys() - {"wafers"} or type(wafers) is not int or not 1 <= wafers <= MAX_NODES:
        return None
    return wafers


# --- The cluster of a run ---------------------------------------------------------------------------------------------


def _owner(config: pytest.Config) -> int:
    """The process whose end is that of the run."""
    workerinput: dict[str, Any] = getattr(config, "workerinput", {})
    return int(workerinput.get(OWNER, os.getpid()))


def _name(owner: int) -> str:
    return f"pytest-{owner}"


def _cluster_of(owner: int) -> LocalCluster | None:
    return next(iter(with_name(local_clusters(), _name(owner))), None)


@contextmanager
def _lock() -> Iterator[None]:
    """Holds the folder of the records for the duration of the block."""
    folder = os.open(runtime_folder(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@pytest.fixture(scope="session")
def waferbox_cluster(request: pytest.FixtureRequest) -> str:
    """The address of the management service of the run's cluster, which all of its processes share.

    It is `embedded` if WAFERBOX_MANAGEMENT is: each backend starts a cluster of its own then.

    Raises:
        ClusterError: the cluster did not start.
        ConfigurationError: WAFERBOX_MANAGEMENT names no cluster.
    """
    if settings.MANAGEMENT.is_set():
        # In the function: a run whose tests need no cluster does not import torch.
        from cstorch._internal.session.management import find_management
        from cstorch.distributed.cluster_config import ClusterConfig

        management = find_management(ClusterConfig())
        return EMBEDDED if management is None else management.address
    owner = _owner(request.config)
    with _lock():  # one of the processes starts the cluster, and the others wait for it
        cluster = _cluster_of(owner)
        if cluster is not None:
            return cluster.management
        # In the function: a run whose tests need no cluster does not import gRPC.
        from waferbox.cluster.embedded_process import start_embedded
        from waferbox.cluster.launcher import ClusterSettings

        wafers = max(1, request.config.stash[_wafers])
        started = start_embedded(ClusterSettings(wafers=wafers), Starter.SCRIPT, _name(owner), owner=owner)
        request.config.stash[_process] = started.process  # whose object warns where it is dropped before its end
        return started.management


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the cluster, in the process that owns it."""
    owner = _owner(config)
    if owner != os.getpid():
        return
    try:
        cluster = _cluster_of(owner)
    except OSError:  # the folder of the records is another user's, so that no cluster was recorded
        return
    if cluster is not None:
        os.kill(cluster.pid, signal.SIGTERM)
        cluster.wait(deadlines.END.launched)


# --- The job of a test ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_job(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a marked test with the cluster; its job ends with it."""
    wafers = _wafers_of(request.node)
    if wafers is None:
        pytest.fail(
            f"{request.node.nodeid}: the marker is written as @pytest.mark.{MARKER}(wafers=2), at most {MAX_NODES}",
            pytrace=False,
        )
    if wafers == 0:
        had_backend = _has_backend()
        yield
        if not _has_backend():
            request.config.stash[_left_open] = ""
        elif not had_backend:
            request.config.stash[_left_open] = request.node.nodeid
        return
    if (culprit := request.config.stash.get(_left_open, "")) and _has_backend():
        request.config.stash[_left_open] = ""
        begin_anew()  # no later test fails for it
        pytest.fail(
            f"{culprit} has left a backend open, beside which there can be no other: mark that test with "
            f"@pytest.mark.{MARKER}, which closes it, or close it there by cstorch.close_backend()",
            pytrace=False,
        )
    address = request.getfixturevalue("waferbox_cluster")
    # A name stays one: a cluster of this account that is found by its name is used with its certificates and secret.
    with _named(settings.MANAGEMENT.get() or address):
        yield
        begin_anew()


def _has_backend() -> bool:
    """Whether this process has a backend; does not import the client library."""
    cstorch = sys.modules.get("cstorch")
    return cstorch is not None and cstorch.current_backend(raise_exception=False) is not None


def begin_anew() -> None:
    """Closes the backend, and sets everything in the client library to its default, as in a new process.

    A loop that is still open ends: pytest keeps the frame of a test that has failed, and so the iterator in it.
    """
    from cstorch import amp, backends
    from cstorch._internal import state
    from cstorch._internal.execution import leave_loop
    from cstorch.backend import close_backend

    try:
        leave_loop(completes_step=False)
    finally:
        close_backend()
    state.clear()  # also what was registered without a backend
    backends.reset()
    amp.enable_mixed_precision(False)
    amp.set_half_dtype("float16")


@contextmanager
def _named(management: str) -> Iterator[None]:
    """Names the cluster for the scripts of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(settings.MANAGEMENT.name, management)
        yield


@pytest.fixture
def csx_backend(request: pytest.FixtureRequest, tmp_path: Path) -> "Backend":
    """A CSX backend with as many wafers as the test's marker says, or one; its files are in `tmp_path`."""
    import cstorch

    wafers = _wafers_of(request.node)
    assert wafers, "the test has a marker, which is right"
    config = cstorch.distributed.ClusterConfig(num_csx=wafers)
    return cstorch.backend("CSX", artifact_dir=tmp_path, cluster_config=config)
