"""One trial: a script runs on a cluster while faults are injected, and its results are compared."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path

import grpc
import psutil
from cluster_rig import SCRIPTS, Restarted, RunningCluster, RunningScript, Surroundings, running_cluster, wait_for
from injected_faults import Fault, Injector, victims_around, victims_of
from role_server import RoleServer
from script_server import ScriptServer

from benchmarks.process_hooks import hook_variables
from wsc.v1 import node_pb2

HOOK = Path(__file__).parent / "chaos_hook.py"
ONE_EXECUTION = SCRIPTS / "recovering.py"
EXECUTIONS = SCRIPTS / "recovering_executions.py"
STEPS = 24  # of a training of the second script, which has three, and two evaluations with half as many each
TRIAL_SECONDS = 150.0
POLL_SECONDS = 0.005
SETTLE_SECONDS = 40.0  # the time until all killed processes are replaced
HANG_SECONDS = 18.0  # a third of it for one that does not compute: longer than a lease lasts


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the job."""

    name: str
    options: Sequence[str]
    members: Sequence[str]
    keepers: Sequence[str]
    script: Path = ONE_EXECUTION
    embedded: bool = False  # the script starts its own cluster
    ingress: bool = False  # the script reaches the cluster through an ingress


def streaming(wafers: int, shards: int, workers: int, *more: str) -> Size:
    """A job in weight streaming mode."""
    options = ("--num-csx", wafers, "--shards", shards, "--workers", workers)
    keepers = [f"memoryx-{n}" for n in range(shards)]
    members = [f"wafer-{n}" for n in range(wafers)] + [f"worker-{n}" for n in range(wafers * workers)] + keepers
    members += ["swarmx-0"] if wafers > 1 else []
    name = " ".join([f"{wafers} wafers, {shards} shards, {workers} workers", *more])
    return Size(name=name, options=[*map(str, options), *more], members=members, keepers=keepers)


SIZES = (
    streaming(1, 1, 1),
    streaming(2, 2, 1),
    streaming(2, 2, 2, "--lane", "grpc"),
    streaming(2, 1, 1, "--restartable"),
    Size(name="pipeline", options=["--pipeline"], members=["wafer-0", "worker-0"], keepers=["wafer-0"]),
)


def with_executions(size: Size, *, embedded: bool = False) -> Size:
    """The job of the script that trains, evaluates, and trains again."""
    name = f"executions, {size.name}" + (", embedded" if embedded else "")
    return replace(size, name=name, script=EXECUTIONS, embedded=embedded)


EXECUTIONS_SIZES = (
    *map(with_executions, SIZES),
    with_executions(SIZES[1]),  # the same three times: it has most of what there is
    with_executions(SIZES[1]),
    with_executions(SIZES[1], embedded=True),
    with_executions(SIZES[1], embedded=True),
)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of a trial."""

    size: Size
    faults: Sequence[Fault]
    injected: int = 0  # of the faults: others' moments did not come
    survived: bool = False
    hung: bool = False
    identical: bool = False
    silence: float = 0.0  # the longest time without output that ended after a fault, in seconds
    silence_began: float = 0.0  # since 1970
    left: str = ""
    errors: str = ""

    @property
    def good(self) -> bool:
        return self.survived and self.identical and not self.left


class Laboratory:
    """A cluster for faults, and the output of the scripts on it without faults."""

    def __init__(
        self,
        cluster: RunningCluster,
        server: ScriptServer,
        folder: Path,
        cache: Path,
        variables: Mapping[str, str],
        *,
        ingress: str,
        steps: int,
        pause: float,
    ) -> None:
        """Makes a laboratory.

        Args:
            cluster: the cluster.
            server: forks the scripts.
            folder: of the trials.
            cache: of the scripts.
            variables: of the cluster's environment, which clusters of scripts have as well.
            ingress: the address of the cluster's ingress; empty: it has none.
            steps: of the script with one execution.
            pause: seconds after each step.
        """
        self.cluster = cluster
        self._ingress = ingress
        self._server = server
        self._folder = folder
        self._cache = cache
        self._variables = variables
        self._options = {
            ONE_EXECUTION: ("--steps", steps, "--stop", 0, "--checkpoint-steps", steps // 3, "--pause", pause),
            EXECUTIONS: ("--steps", STEPS, "--pause", pause),
        }
        self._undisturbed: dict[str, str] = {}
        self._count = 0
        self._whole = len(cluster.nodes())

    def run(self, size: Size, faults: Sequence[Fault]) -> Outcome:
        """Runs a trial, waits until the cluster is whole again, and checks for leftovers."""
        if size.name not in self._undisturbed:
            outcome, self._undisturbed[size.name] = self._run(size, ())
            assert outcome.survived, outcome.errors
            assert not outcome.left, outcome.left
        outcome, output = self._run(size, faults)
        outcome.identical = output == self._undisturbed[size.name]
        if not outcome.identical:
            pairs = zip_longest(output.splitlines(), self._undisturbed[size.name].splitlines())
            outcome.errors += next(f"\ngot: {got}\nnot: {right}\n" for got, right in pairs if got != right)
        return outcome

    def _run(self, size: Size, faults: Sequence[Fault]) -> tuple[Outcome, str]:
        self._count += 1
        outcome = Outcome(size=size, faults=faults)
        surroundings = Surroundings(self._folder / f"trial{self._count}", self._cache)
        victims = victims_around(surroundings) if size.embedded else victims_of(self.cluster)
        with Injector(victims, self._folder / "orders", faults) as injector:
            arguments = ("--artifacts", "artifacts", *size.options, *self._options[size.script])
            variables = {"WAFERBOX_MAX_NUM_RESTARTS": "20", **(self._variables if size.embedded else {})}
            address = self._ingress if size.ingress else self.cluster.management
            management = None if size.embedded else address
            script = RunningScript(surroundings, size.script, arguments, management, variables, server=self._server)
            try:
                times = self._watch(script, surroundings.folder / "output", injector)
                outcome.survived = script.process.poll() == 0
                outcome.hung = script.process.poll() is None
            finally:
                script.close()
        outcome.errors = script.errors
        outcome.injected = len(injector.times)
        if injector.times:
            first = min(injector.times.values())
            gaps = [
                (after - max(before, first), before) for before, after in pairwise([first, *times]) if after > first
            ]
            outcome.silence, outcome.silence_began = max(gaps, default=(0.0, first))
        outcome.left = self._left(surroundings)
        return outcome, script.output

    def figures(self) -> dict[psutil.Process, tuple[str, int, int]]:
        """Name, resident bytes and descriptors of each process of the cluster."""
        found = {}
        for process in self.cluster.surroundings.processes():
            with contextlib.suppress(psutil.Error):
                found[process] = (process.name(), process.memory_info().rss, process.num_fds())
        return found

    def _watch(self, script: RunningScript, output: Path, injector: Injector) -> list[float]:
        """When it has printed something, until it ends."""
        times: list[float] = []
        size = 0
        deadline = time.monotonic() + TRIAL_SECONDS
        while script.process.poll() is None and time.monotonic() < deadline:
            if (now := output.stat().st_size) != size:
                size = now
                times.append(time.time())
                injector.printed(output.read_bytes().count(b"\n"))
            time.sleep(POLL_SECONDS)
        return times

    def _left(self, surroundings: Surroundings) -> str:
        """Returns the leftovers of a job, once the cluster is whole again."""
        recovery = self._folder / "recovery"
        try:
            wait_for(self._is_whole, SETTLE_SECONDS, self._describe)
            wait_for(
                lambda: not recovery.exists() or not os.listdir(recovery),
                explain=lambda: f"recovery points: {list(recovery.rglob('*'))}",
            )
            surroundings.assert_nothing_left()
        except AssertionError as error:
            return str(error)
        return ""

    def _is_whole(self) -> bool:
        with contextlib.suppress(grpc.RpcError):
            nodes = self.cluster.nodes()
            return len(nodes) == self._whole and not any(node.job for node in nodes)
        return False

    def _describe(self) -> str:
        nodes = "; ".join(f"{node.member}@{node.job or '-'} {node.address}" for node in self.cluster.nodes())
        return f"{self._whole} nodes expected: {nodes}"


@contextlib.contextmanager
def running_ingress(cluster: RunningCluster, folder: Path) -> Iterator[str]:
    """Runs an ingress to the cluster; the value is its address. folder: for what its process leaves behind."""
    with contextlib.closing(RoleServer(folder)) as server:
        ingress = Restarted(cluster.surroundings, server, "appliance.ingress", "--management", cluster.management)
        ingress.start("127.0.0.1:0")
        try:
            wait_for(lambda: bool(cluster.nodes(node_pb2.ROLE_INGRESS)))
            yield cluster.nodes(node_pb2.ROLE_INGRESS)[0].address
        finally:
            ingress.end()


@contextlib.contextmanager
def laboratory(
    folder: Path, cache: Path, *, steps: int = 150, pause: float = 0.04, with_ingress: bool = False
) -> Iterator[Laboratory]:
    """A cluster that has all that the largest job needs."""
    (folder / "orders").mkdir(parents=True)
    variables = {
        **hook_variables(HOOK),
        "CHAOS_ORDERS": str(folder / "orders"),
        "WAFERBOX_RECOVERY_DIR": str(folder / "recovery"),
        "WAFERBOX_RECOVERY_SECONDS": "0.5",
        "WAFERBOX_HANG_SECONDS": str(HANG_SECONDS),
    }
    with (
        contextlib.closing(ScriptServer(folder)) as server,
        running_cluster(
            folder / "cluster", cache, variables=variables, wafers=2, memoryx=2, swarmx=1, workers=4
        ) as cluster,
        running_ingress(cluster, folder) if with_ingress else contextlib.nullcontext("") as ingress,
    ):
        yield Laboratory(cluster, server, folder, cache, variables, ingress=ingress, steps=steps, pause=pause)
