"""A process that copies recovery points, as a shard of MemoryX on another host does."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from waferbox.states.point_copies import PointCopies
from wsc.v1 import node_pb2

JOB: Final = "job"
OWNER: Final = "memoryx-0"


class Copier:
    """That process, and what it is told. One copy at a time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def copy(self, number: int) -> None:
        """Begin to copy a point, and forget those before the last."""
        assert self._process.stdin is not None
        print(number, file=self._process.stdin, flush=True)

    def seconds(self) -> float:
        """That the next copy has taken, once it is made; NaN if it was not, as a later one was wanted."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())


@contextlib.contextmanager
def new_copier(folder: Path, address: str) -> Iterator[Copier]:
    """One that keeps copies in a folder, of the points of who listens at an address."""
    command = [sys.executable, "-m", "benchmarks.recovery_copier", str(folder), address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Copier(process)


def main() -> None:
    folder, address = Path(sys.argv[1]), sys.argv[2]

    def tell(copied: node_pb2.RecoveryPointCopied) -> None:
        print("nan" if copied.given_up else copied.seconds, flush=True)

    copies = PointCopies(lambda: folder, JOB, "memoryx-1", tell, print, stays_in_memory=True)
    for line in sys.stdin:
        number = int(line)
        copies.drop(number - 1)
        copies.copy(node_pb2.CopyRecoveryPoint(member=OWNER, address=address, recovery_point=number))
    copies.drop(2**64 - 1)
    copies.close()


if __name__ == "__main__":
    main()
