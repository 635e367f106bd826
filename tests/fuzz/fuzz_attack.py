"""A cluster with a job that trains, and somebody who sends it malformed messages from several threads."""

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from cluster_rig import SCRIPTS, RunningCluster, RunningScript, Surroundings, running_cluster
from malformed_messages import Malformed, methods

from waferbox import settings
from waferbox.links.grpc_lane import METHOD
from waferbox.rpc.server import make_channel
from waferbox.security.rights import RIGHTS
from waferbox.security.tokens import ClusterSecret, Kind

SCRIPT = SCRIPTS / "recovering.py"
THREADS = 4
WARM_UP = 500  # messages, before memory is looked at
CALL_SECONDS = 0.5
MESSAGES_A_CALL = 4
MAX_GROWTH = 20 << 20  # bytes of resident memory, of each process
# What it is right to do with these tokens ends the job or the cluster.
HARMFUL = ("/wsc.v1.Management/Shutdown",)


@dataclass(slots=True, kw_only=True)
class Result:
    """Of an attack."""

    sent: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    died: Sequence[str] = ()
    growth: int = 0  # bytes, of the process that has grown most
    grown: str = ""
    survived: bool = False
    identical: bool = False

    @property
    def good(self) -> bool:
        return self.survived and self.identical and not self.died and self.growth <= MAX_GROWTH


class Attack:
    """Sends messages to all processes of a cluster. Thread-safe."""

    def __init__(self, cluster: RunningCluster, secret: ClusterSecret, seed: int) -> None:
        self._secret = secret
        self._seed = seed
        self._lock = threading.Lock()
        self._methods = methods()
        self.answers: Counter[str] = Counter()
        processes = cluster.surroundings.processes()
        self._addresses = sorted({address for process in processes for address in _listens(process)})
        self._sockets = _link_sockets({process.pid for process in processes})
        jobs = [job.job for job in cluster.jobs()]
        self._unserved: set[tuple[str, str]] = set()  # addresses and methods
        self._names = [*jobs, *self._addresses, *(node.member for node in cluster.nodes() if node.member)]

    def send(self, part: int, count: int) -> int:
        """So many messages, in a thread; returns how many were sent."""
        malformed = Malformed((self._seed, part), self._names)
        generator = malformed._random
        sent = 0
        with contextlib.ExitStack() as stack:
            channels = {address: stack.enter_context(make_channel(address, "")) for address in self._addresses}
            while sent < count:
                if self._sockets and generator.random() < 0.2:
                    sent += self._send_frames(generator.choice(self._sockets), malformed)
                else:
                    address, path = generator.choice(self._addresses), generator.choice([*self._methods, METHOD])
                    if (address, path) in self._unserved:
                        continue
                    answer, count_sent = self._call(channels[address], path, malformed, generator.random() < 0.7)
                    sent += count_sent
                    if answer == "UNIMPLEMENTED":
                        self._unserved.add((address, path))
        return sent

    def _call(self, channel: grpc.Channel, path: str, malformed: Malformed, with_token: bool) -> tuple[str, int]:
        metadata = []
        if with_token and path not in HARMFUL:
            kinds = sorted(RIGHTS[path].kinds, key=lambda kind: kind.value)
            if kinds:
                kind = malformed._random.choice(kinds)
                names = ("job-00000000", "instance", "1") if kind is Kind.LEASE else ("job-00000000",)
                token = self._secret.token(kind, *(() if kind in (Kind.NODE, Kind.MANAGEMENT, Kind.ADMIN) else names))
                metadata = [("authorization", f"Bearer {token}")]
        if path == METHOD:
            messages = [malformed.frame() for _ in range(MESSAGES_A_CALL)]
        else:
            method = self._methods[path]
            count = MESSAGES_A_CALL if method.client_streaming else 1
            messages = [malformed.message(method) for _ in range(count)]
        call = channel.stream_stream(path)(iter(messages), timeout=CALL_SECONDS, metadata=metadata)
        answer = "answered"
        try:
            for _ in call:
                break
        except grpc.RpcError as error:
            answer = str(error.code().name)
        finally:
            call.cancel()
        self._count(answer, len(messages))
        return answer, len(messages)

    def _send_frames(self, name: str, malformed: Malformed) -> int:
        sent = 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(CALL_SECONDS)
            with contextlib.suppress(OSError):
                connection.connect(f"\0{name}")
                for _ in range(MESSAGES_A_CALL):
                    connection.send(malformed.frame())
                    sent += 1
        self._count("frames", max(1, sent))
        return max(1, sent)

    def _count(self, answer: str, count: int) -> None:
        with self._lock:
            self.answers[answer] += count


def attack(folder: Path, messages: int, seed: int) -> Result:
    """Train once in peace and once under attack, and compare."""
    (folder / "cache").mkdir(parents=True)
    result = Result()
    size = ("--num-csx", 2, "--shards", 2, "--artifacts", "artifacts", "--steps", 60, "--stop", 30)
    with running_cluster(folder / "cluster", folder / "cache", wafers=2, memoryx=2, workers=2) as cluster:
        scripts = []
        for number in range(2):
            script = RunningScript(
                Surroundings(folder / f"script{number}", folder / "cache"), SCRIPT, size, cluster.management
            )
            scripts.append(script)
            try:
                script.wait_for_output("30 ")
                if number:
                    _send(cluster, messages, seed, result)
                (script.surroundings.folder / "go").touch()
                result.survived = script.wait() == 0
            finally:
                script.close()
        result.identical = scripts[0].output == scripts[1].output
    return result


def _send(cluster: RunningCluster, messages: int, seed: int, result: Result) -> None:
    secret = ClusterSecret(Path(os.environ[settings.SECRET_FILE.name]).read_bytes())
    one = Attack(cluster, secret, seed)
    one.send(-1, min(WARM_UP, messages))
    before = _memory(cluster)
    with ThreadPoolExecutor(THREADS) as pool:
        result.sent = sum(pool.map(lambda part: one.send(part, messages // THREADS), range(THREADS)))
    after = _memory(cluster)
    result.answers = one.answers
    result.died = [name for process, (name, _) in before.items() if process not in after]
    grown = [(after[process][1] - size, name) for process, (name, size) in before.items() if process in after]
    result.growth, result.grown = max(grown)


def _memory(cluster: RunningCluster) -> dict[psutil.Process, tuple[str, int]]:
    found = {}
    for process in cluster.surroundings.processes():
        with contextlib.suppress(psutil.Error):
            found[process] = (process.name(), process.memory_info().rss)
    return found


def _listens(process: psutil.Process) -> Iterator[str]:
    with contextlib.suppress(psutil.Error):
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                yield f"127.0.0.1:{connection.laddr.port}"


def _link_sockets(pids: set[int]) -> list[str]:
    """The names of the abstract sockets at which these processes listen for links."""
    inodes = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(path)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({line[7][1:] for line in lines if len(line) == 8 and line[6] in inodes and "@waferbox-" in line[7]})
