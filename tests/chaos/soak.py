"""`python tests/chaos/soak.py [--jobs 200]`: short jobs, three at a time, on one cluster; what has grown afterwards."""

import argparse
import os
import secrets
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / each) for each in ("integration", "shared")), str(HERE.parents[1])]

import psutil  # noqa: E402
from cluster_rig import SCRIPTS, RunningCluster, RunningScript, Surroundings, running_cluster, wait_for  # noqa: E402
from script_server import ScriptServer  # noqa: E402

AT_A_TIME = 3
WARM_UP = 30  # jobs, until processes have what they keep
STEPS = 20
JOB_SECONDS = 120.0
MOST_GROWTH = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of a process."""

    name: str
    resident: int  # bytes
    descriptors: int
    threads: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/chaos/soak.py", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    options = parser.parse_args()
    if options.jobs <= WARM_UP:
        parser.error(f"--jobs must be more than {WARM_UP}, which come before anything is measured")
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        os.environ["WAFERBOX_SECRET_FILE"] = str(folder / f"{secrets.token_hex(4)}.key")
        with (
            closing(ScriptServer(folder)) as server,
            running_cluster(
                folder / "cluster",
                folder / "cache",
                wafers=AT_A_TIME,
                memoryx=AT_A_TIME,
                swarmx=AT_A_TIME,
                workers=AT_A_TIME,
            ) as cluster,
        ):
            soak = _Soak(cluster, server, folder)
            soak.run(WARM_UP)
            before = soak.figures()
            soak.run(options.jobs - WARM_UP)
            after = soak.figures()
            bad = soak.failures
    for failure in bad:
        print(failure)
    print(f"{options.jobs} jobs, {len(bad)} of them failed or gave something else")
    return 1 if _tell(before, after) or bad else 0


class _Soak:
    def __init__(self, cluster: RunningCluster, server: ScriptServer, folder: Path) -> None:
        self._cluster = cluster
        self._server = server
        self._folder = folder
        self._count = 0
        self._output = ""  # of the first
        self.failures: list[str] = []

    def run(self, count: int) -> None:
        """So many jobs more; returns when the cluster is free."""
        numbers = range(self._count, self._count + count)
        self._count += count
        begin = time.monotonic()
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for number, output in zip(numbers, pool.map(self._job, numbers), strict=True):
                self._output = self._output or output
                if output != self._output:
                    self.failures.append(f"job {number}: {output}")
        print(f"{count} jobs in {time.monotonic() - begin:.0f} s", flush=True)
        wait_for(lambda: not any(node.job for node in self._cluster.nodes()))
        wait_for(lambda: all(job.ended for job in self._cluster.jobs()))

    def _job(self, number: int) -> str:
        """What it printed, or why it failed."""
        surroundings = Surroundings(self._folder / f"job{number}", self._folder / "cache")
        arguments = ("--artifacts", "artifacts", "--steps", STEPS, "--stop", 0, "--checkpoint-steps", STEPS // 2)
        script = RunningScript(
            surroundings, SCRIPTS / "recovering.py", arguments, self._cluster.management, server=self._server
        )
        try:
            status = script.wait(JOB_SECONDS)
        finally:
            script.close()
        return script.output if not status else f"exit status {status}: {script.errors}"

    def figures(self) -> dict[psutil.Process, Figures]:
        """Of each process of the cluster."""
        return {
            process: Figures(
                name=process.name(),
                resident=process.memory_info().rss,
                descriptors=process.num_fds(),
                threads=process.num_threads(),
            )
            for process in self._cluster.surroundings.processes()
        }


def _tell(before: dict[psutil.Process, Figures], after: dict[psutil.Process, Figures]) -> bool:
    """Prints what each process has, and had; whether any has grown."""
    grown = after.keys() != before.keys()
    if grown:
        print(f"processes: {[each.name for each in before.values()]}, then {[each.name for each in after.values()]}")
    for process in before.keys() & after.keys():
        was, now = before[process], after[process]
        growth = now.resident / was.resident - 1
        is_larger = now.descriptors > was.descriptors or now.threads > was.threads or growth > MOST_GROWTH
        print(
            f"{was.name}: memory {was.resident >> 20} MiB, then {growth:+.1%}; descriptors {was.descriptors}, then "
            f"{now.descriptors}; threads {was.threads}, then {now.threads}{' GROWN' if is_larger else ''}"
        )
        grown |= is_larger
    return grown


if __name__ == "__main__":
    sys.exit(main())
