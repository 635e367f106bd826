"""A cluster of which each process is started alone, by `python -m ROLE`, on the host that it is meant for."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from benchmarks.network import Host
from waferbox.host.descriptors import readable
from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc

ROOT: Final = Path(__file__).parents[1]
START_SECONDS: Final = 60.0
END_SECONDS: Final = 15.0


class Process(Protocol):
    """A process that was started here."""

    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


# The host, the module and its arguments, the environment, the descriptor of output and of errors, and other descriptors
# that the arguments name.
StartModule: TypeAlias = Callable[[Host, Sequence[str], Mapping[str, str], int, Sequence[int]], Process]


def start_python(
    place: Host, words: Sequence[str], variables: Mapping[str, str], output: int, fds: Sequence[int]
) -> Process:
    """A StartModule: `python -m`."""
    return subprocess.Popen(
        place.command(sys.executable, "-m", *words),
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
    )


@contextlib.contextmanager
def cluster_by_hand(
    host: Host,
    places: Sequence[tuple[str, Host]],
    variables: Mapping[str, str],
    log: Path,
    start: StartModule = start_python,
) -> Iterator[str]:
    """The address of a management service, once all roles have registered there; none of them is left afterwards.

    Args:
        host: of the management service.
        places: module and host of each role.
        variables: the environment of all.
        log: a file for what they print.
        start: starts each of them; a Python of its own by default.

    Raises:
        TimeoutError: somebody did not come; the message has the log.
    """
    with contextlib.ExitStack() as stack:
        messages = stack.enter_context(log.open("wb"))

        def begin(place: Host, *words: str, fds: Sequence[int] = ()) -> Process:
            process = start(place, words, variables, messages.fileno(), fds)
            for end in (process.kill, lambda: process.wait(END_SECONDS), process.terminate):
                stack.callback(end)
            return process

        reader, writer = os.pipe()
        announcement = stack.enter_context(open(reader, encoding="utf-8"))
        try:
            begin(host, "appliance", "--listen", f"{host.address}:0", "--announce-fd", str(writer), fds=[writer])
        finally:
            os.close(writer)
        line = announcement.readline() if readable([announcement], START_SECONDS) else ""
        if not line:
            raise TimeoutError(f"the management service did not start: {log.read_text()}")
        management: str = json.loads(line)["management"]
        for module, place in places:
            begin(place, module, "--management", management, "--listen", f"{place.address}:0")
        # Asked by a process on the host, which may be the only one that reaches the address.
        if begin(host, "benchmarks.by_hand", management, str(len(places))).wait(2 * START_SECONDS):
            raise TimeoutError(f"not all of {len(places)} nodes came within {START_SECONDS:g} s: {log.read_text()}")
        yield management


def main() -> int:
    """Waits until so many nodes are registered."""
    management, count = sys.argv[1], int(sys.argv[2])
    deadline = time.monotonic() + START_SECONDS
    request = management_pb2.ListNodesRequest(at_least=count, wait_seconds=1.0)
    with make_channel(management) as channel:
        stub = management_pb2_grpc.ManagementStub(channel)
        while time.monotonic() < deadline:
            if len(stub.ListNodes(request, timeout=START_SECONDS).nodes) >= count:
                return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
