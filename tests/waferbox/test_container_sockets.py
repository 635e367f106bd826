"""Links of processes that have network and process namespaces of their own, as containers have: over sockets with names
in a folder that both see, where there is one.
"""

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson
from link_pairs import DEADLINE_SECONDS, connect, filled, listening, raise_defect
from link_peer import GROUP, NBYTES

from waferbox import settings
from waferbox.links.dialling import dial
from waferbox.links.handshake import acceptance, hello
from waferbox.links.hub import Hub
from waferbox.links.link import LinkLost
from waferbox.links.listener import LinkListener
from waferbox.links.socket_names import YOUNG_SECONDS, host_id
from waferbox.rpc.server import make_server
from wsc.v1 import node_pb2

ROOT = Path(__file__).parents[2]
PEER = ROOT / "tests" / "shared" / "link_peer.py"
PEER_SECONDS = 40.0
NOBODY = 65534

_USER = [] if os.geteuid() == 0 else ["--user", "--map-current-user"]
CONTAINER = ["unshare", *_USER, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def namespaces_can_be_made() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*CONTAINER, "true"], capture_output=True, timeout=20).returncode == 0


needs_namespaces = pytest.mark.skipif(not namespaces_can_be_made(), reason="no namespace can be made here")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets, as that of tmp_path does not."""
    with tempfile.TemporaryDirectory(prefix="wb-") as path:
        yield Path(path)


@pytest.fixture
def folder(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one that containers share."""
    folder = short_path / "sockets"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(settings.SOCKETS.name, str(folder))
    return folder


def peer(endpoint: node_pb2.LinkEndpoint, token: str, folder: Path | None, lane: str) -> subprocess.Popen[str]:
    """A process in a container, which dials the endpoint; the folder is what it finds in WAFERBOX_SOCKETS."""
    environment = {name: value for name, value in os.environ.items() if name != settings.SOCKETS.name}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "client", ROOT / "proto")))
    if folder is not None:
        environment[settings.SOCKETS.name] = str(folder)
    command = [*CONTAINER, sys.executable, str(PEER), MessageToJson(endpoint, indent=None), token, lane]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def heard(process: subprocess.Popen[str]) -> dict[str, object]:
    try:
        output, _ = process.communicate(timeout=PEER_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0
    said = json.loads(output)
    assert isinstance(said, dict)
    assert said["pid"] == 1, "of its own process namespace"
    assert said["network"] != os.stat("/proc/self/ns/net").st_ino
    return said


def exchange(listener: LinkListener, process: subprocess.Popen[str]) -> tuple[str, bool]:
    """What the peer sends is sent back: the lane, and whether it came as a reference to its memory."""
    pending = listener.expect("secret", "dialler")
    link = pending.wait(PEER_SECONDS)
    hub = Hub()
    hub.add(link)
    message = hub.receive(link, GROUP, 1)
    payload = filled(NBYTES)
    assert message.view == payload.view
    shared = message.memory is not None
    hub.send(link, GROUP, 2, payload)
    hub.receive(link, GROUP, 3)
    lane = link.lane
    hub.close()
    link.close()
    return lane, shared


@needs_namespaces
def test_containers_of_one_host_share_memory(folder: Path) -> None:
    with listening() as listener:
        process = peer(listener.endpoint(), "secret", folder, "LANE_UNSPECIFIED")
        assert exchange(listener, process) == ("shared memory", True)
        said = heard(process)
    assert (said["lane"], said["shared"], said["equal"]) == ("shared memory", True, True)


@needs_namespaces
def test_the_folder_may_have_another_name_in_each_container(folder: Path, short_path: Path) -> None:
    (short_path / "elsewhere").symlink_to(folder)
    with listening() as listener:
        process = peer(listener.endpoint(), "secret", short_path / "elsewhere", "LANE_SHARED_MEMORY")
        assert exchange(listener, process) == ("shared memory", True)
        heard(process)


@needs_namespaces
@pytest.mark.parametrize("whose", ["the dialler's", "the listener's"])
def test_without_the_folder_they_take_grpc(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    if whose == "the listener's":
        monkeypatch.delenv(settings.SOCKETS.name)
    server = make_server()
    address = f"unix:{tmp_path}/grpc"  # which a container without a network can reach
    listener = LinkListener(address, raise_defect)
    listener.add_to_server(server)
    assert server.add_insecure_port(address)
    server.start()
    process = peer(listener.endpoint(), "secret", None if whose == "the dialler's" else folder, "LANE_UNSPECIFIED")
    assert exchange(listener, process) == ("grpc", False)
    assert heard(process)["lane"] == "grpc"
    listener.close()
    server.stop(None).wait()


@needs_namespaces
@pytest.mark.parametrize("other", ["none", "missing", "another"])
def test_shared_memory_is_refused_without_the_same_folder(folder: Path, tmp_path: Path, other: str) -> None:
    (tmp_path / "another").mkdir()
    seen = None if other == "none" else tmp_path / other
    with listening() as listener:
        said = heard(peer(listener.endpoint(), "secret", seen, "LANE_SHARED_MEMORY"))
    assert "it is on another host" in str(said["error"])


def test_two_ends_of_one_process_use_the_folder(folder: Path) -> None:
    with listening() as listener:
        (name,) = (path.name for path in folder.iterdir())
        assert listener.endpoint().socket == name
        assert (folder / name).is_socket()
        assert listener.endpoint().host != host_id()
        ends = connect(listener, "socket")
        assert {end.link.lane for end in ends} == {"shared memory"}
        for end in ends:
            end.close()
    assert list(folder.iterdir()) == [], "a listener that has ended leaves no socket"


def test_a_stranger_without_the_token_is_refused(folder: Path) -> None:
    with listening() as listener:
        pending = listener.expect("secret", "here")
        with pytest.raises(LinkLost):
            dial(
                listener.endpoint(),
                "a guess",
                name="there",
                own_name="here",
                lane=node_pb2.LANE_SHARED_MEMORY,
                deadline_seconds=0.5,
            )
        with pytest.raises(LinkLost, match="did not connect"):
            pending.wait(0.1)


def call_as_nobody(path: Path) -> int:
    """1: the file system refuses; 2: who listens hangs up; 3: it answers."""
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.settimeout(DEADLINE_SECONDS)
        try:
            caller.connect(str(path))
        except PermissionError:
            return 1
        try:
            caller.sendmsg(hello("secret"))
            return 3 if caller.recv(100) else 2
        except (BrokenPipeError, ConnectionResetError):
            return 2


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can be another user")
@pytest.mark.parametrize("opened", [False, True], ids=["by the folder", "by the kernel's word, in a folder left open"])
def test_another_user_is_refused(folder: Path, short_path: Path, opened: bool) -> None:
    with listening() as listener:
        pending = listener.expect("secret", "here")
        path = folder / listener.endpoint().socket
        if opened:
            for each in (folder, short_path):
                each.chmod(0o755)
            path.chmod(0o666)
        process = os.fork()
        if process == 0:
            with contextlib.suppress(BaseException):
                os._exit(call_as_nobody(path))
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == (2 if opened else 1)
        with pytest.raises(LinkLost, match="did not connect"):
            pending.wait(0.1)


def test_another_who_takes_the_socket_s_place_is_told_nothing(folder: Path) -> None:
    with listening() as listener:
        endpoint = listener.endpoint()
        (folder / endpoint.socket).unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
            squatter.bind(str(folder / endpoint.socket))
            squatter.listen()
            squatter.settimeout(DEADLINE_SECONDS)
            with ThreadPoolExecutor(1) as threads:
                dialled = threads.submit(
                    dial,
                    endpoint,
                    "secret",
                    name="there",
                    own_name="here",
                    lane=node_pb2.LANE_SHARED_MEMORY,
                    deadline_seconds=DEADLINE_SECONDS,
                )
                connection, _ = squatter.accept()
                with connection:
                    assert b"secret" not in connection.recv(4096)
                    connection.send(acceptance("another secret"))
                    with pytest.raises(LinkLost, match="does not have the link's token"):
                        dialled.result(DEADLINE_SECONDS)


def killed_listener(folder: Path) -> Path:
    """The socket of a process that was killed."""
    script = (
        "from waferbox.links.socket_names import NamedSocket; s = NamedSocket(); print(s.name, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        path = folder / process.stdout.readline().strip()
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_SECONDS)
    assert path.is_socket()
    return path


def grow_old(path: Path) -> None:
    then = time.time() - 2 * YOUNG_SECONDS
    os.utime(path, (then, then))


def test_who_listens_next_removes_the_sockets_of_the_killed(folder: Path) -> None:
    left = killed_listener(folder)
    young = killed_listener(folder)
    other = folder / "something else"
    other.touch()
    with listening() as living:
        grow_old(left)
        grow_old(folder / living.endpoint().socket)
        with listening() as next_one:
            names = {path.name for path in folder.iterdir()}
            assert names == {other.name, young.name, living.endpoint().socket, next_one.endpoint().socket}
            for end in connect(living, "socket"):
                end.close()


@pytest.mark.parametrize("fault", ["missing", "open to others", "a file", "too long"])
def test_a_folder_that_cannot_be_used_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    if fault == "open to others":
        folder.chmod(0o755)
    elif fault == "too long":
        (folder / ("long" * 20)).mkdir(mode=0o700)
        monkeypatch.setenv(settings.SOCKETS.name, str(folder / ("long" * 20)))
    else:
        folder.rmdir()
        if fault == "a file":
            folder.touch(mode=0o600)
    with caplog.at_level(logging.WARNING), listening() as listener:
        assert "Links between containers of this host take gRPC" in caplog.text
        assert listener.endpoint().host == host_id()


def test_a_name_does_not_lead_out_of_the_folder(folder: Path, short_path: Path) -> None:
    with listening() as listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as outside:
        outside.bind(str(short_path / "outside"))
        outside.listen()
        endpoint = listener.endpoint()
        endpoint.socket = "../outside"
        with pytest.raises(LinkLost, match="cannot be reached"):
            dial(
                endpoint,
                "secret",
                name="there",
                own_name="here",
                lane=node_pb2.LANE_SHARED_MEMORY,
                deadline_seconds=0.5,
            )


def test_without_proc_the_error_says_to_mount_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(path: str) -> os.stat_result:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        with pytest.raises(FileNotFoundError, match=r"/proc must be mounted .*: /proc/self/ns/net, "):
            host_id()
