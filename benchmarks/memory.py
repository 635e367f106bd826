"""What each role has in memory while a model trains, beside what the plan says (OWN MEMORY in plan.proto).

Of a cluster that starts as any does or, on several hosts, process by process. When a small model has been trained, and
while a script trains the model, the private memory of each role is read from /proc, with the shared memory that it made
itself. Linux only.

    python -m benchmarks.memory
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from appliance.compiler.artifacts import read_plan
from benchmarks.by_hand import ROOT, Process, cluster_by_hand
from benchmarks.network import HERE, Host
from benchmarks.runs import ENVIRONMENT
from waferbox.host.descriptors import readable
from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2, plan_pb2

STEPS: Final = 6
IDLE: Final = "idle\n"  # what a script says before it trains the model
MOST_STEPS: Final = 100_000
SAMPLE_SECONDS: Final = 0.1  # the kernel takes a quarter of it to list the memory of four processes
LOAD_SAMPLE_SECONDS: Final = 0.5  # while it is compiled and loaded: what comes then stays, or is there in steps too
SAMPLES: Final = 12  # of what is there while steps run
TOLERANCE: Final = 0.10
TOLERANCE_BYTES: Final = 16 << 20
CLOSE_BYTES: Final = 32 << 20
DEEP_WIDTH: Final = 1024
DEEP_LAYERS: Final = 16
ROLES: Final = {node_pb2.ROLE_WAFER: "wafer", node_pb2.ROLE_SWARMX: "swarmx", node_pb2.ROLE_MEMORYX: "memoryx"}


class Started(Process, Protocol):
    """A process of which it can be seen that it has ended."""

    def poll(self) -> int | None: ...


# The host, the module and its arguments, the environment, and the descriptors by number, with 0, 1 and 2 among them.
Start: TypeAlias = Callable[[Host, Sequence[str], Mapping[str, str], Mapping[int, int]], Started]


def start_python(place: Host, words: Sequence[str], variables: Mapping[str, str], fds: Mapping[int, int]) -> Started:
    """A Start: `python -m`. Descriptors from 3 on keep their numbers."""
    return subprocess.Popen(
        place.command(sys.executable, "-m", *words),
        cwd=ROOT,
        env=variables,
        stdin=fds[0],
        stdout=fds[1],
        stderr=fds[2],
        pass_fds=[fd for fd in fds.values() if fd > 2],
    )


class Embeddings(nn.Module):
    """Two large tables: one whose gradient comes first, one whose gradient comes last, and little between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(30_000, 256), nn.Embedding(20_000, 256)
        self.between = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, :8] * 10_000).long().abs() % 20_000
        x = self.first(rows)
        for layer in self.between:
            x = torch.tanh(layer(x))
        return x * self.last(rows)


class Deep(nn.Module):
    """Many equal layers: in all far more than what is sent at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DEEP_WIDTH, DEEP_WIDTH) for _ in range(DEEP_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(1, DEEP_WIDTH // x.shape[1])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Clipped(Deep):
    """The same with a norm over all gradients, for which MemoryX keeps them."""


class Images(nn.Module):
    """A convolutional network with wide, shallow layers: a hundred megabytes of activations, hardly any weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(5))
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return self.last(x.mean((2, 3)))


class LongSequence(nn.Module):
    """A transformer with attention written out, over sequences that are long for its width."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(128, 3 * 128) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(128, 512) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(512, 128) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(2):
            parts = self.inputs[layer](self.norms[2 * layer](x)).split(128, dim=2)
            q, k, v = (part.view(*x.shape[:2], 4, 32).transpose(1, 2) for part in parts)
            weights = torch.softmax(q @ k.transpose(2, 3) / 32**0.5, dim=-1)
            x = x + self.outputs[layer]((weights @ v).transpose(1, 2).reshape(x.shape))
            x = x + self.down[layer](F.gelu(self.up[layer](self.norms[2 * layer + 1](x))))
        return x


class Small(nn.Module):
    """Takes next to nothing, and has torch import what it imports at the first operation of its kind: 70 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.softmax(self.layer(x.view(-1, 1, 8, 8)), dim=-1)
        return F.mse_loss(x, torch.zeros_like(x))


MODELS: Final[Mapping[str, type[nn.Module]]] = {
    "embeddings": Embeddings,
    "deep": Deep,
    "clipped": Clipped,
    "images": Images,
    "sequence": LongSequence,
}
# Of the batch of all wafers.
SHAPES: Final[Mapping[str, Sequence[int]]] = {
    "embeddings": (64, 64),
    "deep": (64, 64),
    "clipped": (64, 64),
    "images": (16, 3, 128, 128),
    "sequence": (8, 768, 128),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one process, in bytes."""

    planned: int
    link: int  # planned besides, at most, if links are between hosts
    measured: int

    @property
    def fits(self) -> bool:
        """Of links within one host."""
        return abs(self.measured - self.planned) <= self._tolerance

    @property
    def fits_links(self) -> bool:
        """Of links between hosts: the bound holds, and is at most twice what is there, or not far from it."""
        bound = self.planned + self.link
        return bound <= max(2 * self.measured, self.measured + CLOSE_BYTES) and self.measured <= bound + self._tolerance

    @property
    def _tolerance(self) -> float:
        return max(TOLERANCE * self.planned, TOLERANCE_BYTES)


def own_bytes(process: int) -> int:
    """The resident memory that is the process's own: private memory, and shared memory that it made."""
    total = 0
    counts = False
    mine = f"/memfd:waferbox-{process} "
    with open(f"/proc/{process}/smaps", encoding="ascii") as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):
                path = line.split(maxsplit=5)[5:]
                counts = not path or path[0].startswith(("[heap]", "[stack", "[anon", mine))
            elif counts and first == "Rss:":
                total += int(rest.split()[0]) * 1024
    return total


def measure(
    model: str,
    wafers: int,
    lane: str = "auto",
    host: Host = HERE,
    wafer_host: Host = HERE,
    steps: int = STEPS,
    start: Start = start_python,
) -> dict[str, Figures]:
    """By process: "wafer-0", "swarmx-0" and so on.

    Args:
        model: one of MODELS.
        wafers: how many.
        lane: as of a ClusterConfig.
        host: of all but wafers and workers; and of the script.
        wafer_host: of wafers and workers.
        steps: at least.
        start: starts each process.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = {**os.environ, **ENVIRONMENT, "WAFERBOX_CACHE": f"{name}/cache", "OMP_NUM_THREADS": "1"}
        with _cluster(wafers, host, wafer_host, variables, folder / "roles.log", start) as management:
            processes = _processes(host, management, variables, start)
            words = ["benchmarks.memory", "script", model, "--wafers", str(wafers), "--lane", lane]
            words += ["--folder", f"{name}/model"]
            variables["WAFERBOX_MANAGEMENT"] = management
            most = _watch(lambda fds: start(host, words, variables, fds), processes, steps)
        path = max(folder.rglob("*.plan"), key=lambda path: path.stat().st_mtime)
        plan = read_plan(path)
    assert plan is not None, "it was compiled just now"
    return {name: _figures(plan, name, most[name]) for name in sorted(processes)}


@contextlib.contextmanager
def embedded_cluster(
    options: Sequence[str], variables: Mapping[str, str], log: Path, start: Start = start_python
) -> Iterator[str]:
    """The address of the management service of `python -m waferbox.cluster.embedded`."""
    given, held = os.pipe()
    reader, output = os.pipe()
    with log.open("wb") as messages, open(reader, encoding="utf-8") as announcement:
        try:
            fds = {0: given, 1: output, 2: messages.fileno()}
            process = start(HERE, ["waferbox.cluster.embedded", *options], variables, fds)
        finally:
            os.close(given)
            os.close(output)
        try:
            line = announcement.readline()
            if not line:
                raise RuntimeError(log.read_text())
            yield json.loads(line)["management"]
        finally:
            os.close(held)  # the cluster's end
            process.wait()


@contextlib.contextmanager
def _cluster(
    wafers: int, host: Host, wafer_host: Host, variables: Mapping[str, str], log: Path, start: Start
) -> Iterator[str]:
    """The address of the management service. On several hosts each process is started alone."""
    if host is HERE:
        with embedded_cluster(["--wafers", str(wafers)], variables, log, start) as management:
            yield management
        return

    def begin(
        place: Host, words: Sequence[str], variables: Mapping[str, str], output: int, fds: Sequence[int]
    ) -> Started:
        with open(os.devnull, "rb") as nothing:
            return start(place, words, variables, {0: nothing.fileno(), 1: output, 2: output, **{fd: fd for fd in fds}})

    places = [("memoryx", host), *([("swarmx", host)] if wafers > 1 else [])]
    places += [(role, wafer_host) for role in ["workers"] * wafers + ["wafer"] * wafers]
    with cluster_by_hand(host, places, variables, log, begin) as management:
        yield management


def _watch(
    start_script: Callable[[Mapping[int, int]], Started], processes: Mapping[str, int], steps: int
) -> dict[str, int]:
    """Runs a script; the most that each process has beyond what it has when the script says that it will begin.

    The script goes on until enough has been seen, however slow the machine is.
    """
    given, told = os.pipe()
    reader, output = os.pipe()
    with tempfile.TemporaryFile("w+") as errors, open(told, "wb", 0) as words, open(reader, "rb", 0) as lines:
        try:
            script = start_script({0: given, 1: output, 2: errors.fileno()})
        finally:
            os.close(given)
            os.close(output)
        try:
            for line in lines:
                if line == IDLE.encode():
                    break
            idle = {name: own_bytes(process) for name, process in processes.items()}
            most = idle
            words.write(b"\n")
            os.set_blocking(reader, False)
            num_steps = num_samples = 0
            while script.poll() is None:
                most = {name: max(most[name], own_bytes(process)) for name, process in processes.items()}
                num_steps += (lines.read(4096) or b"").count(b"\n")
                num_samples += num_steps > 0
                if num_steps >= steps and num_samples >= SAMPLES:
                    words.close()
                time.sleep(SAMPLE_SECONDS if num_steps else LOAD_SAMPLE_SECONDS)
        finally:
            script.kill()
        if status := script.wait():
            errors.seek(0)
            raise RuntimeError(f"status {status}: {errors.read()}")
    return {name: most[name] - idle[name] for name in processes}


def _figures(plan: plan_pb2.Plan, name: str, measured: int) -> Figures:
    of_role: dict[str, plan_pb2.WaferPlan | plan_pb2.SwarmXPlan | plan_pb2.MemoryXPlan]
    of_role = {"wafer": plan.wafer, "swarmx": plan.swarmx, "memoryx": plan.memoryx[0]}
    part = of_role[name.partition("-")[0]]
    return Figures(planned=part.own_bytes, link=part.link_bytes, measured=measured)


def _processes(host: Host, management: str, variables: Mapping[str, str], start: Start) -> dict[str, int]:
    """By name."""
    if host is HERE:
        return dict(_nodes(management))
    # Asked by a process on the host, which may be the only one that reaches the address.
    with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile("w+") as said:
        words = ["benchmarks.memory", "nodes", "--management", management]
        fds = {0: nothing.fileno(), 1: said.fileno(), 2: said.fileno()}
        status = start(host, words, variables, fds).wait()
        said.seek(0)
        output = said.read()
    assert status == 0, output
    return {name: int(process) for name, process in map(str.split, output.splitlines())}


def _nodes(management: str) -> Iterator[tuple[str, int]]:
    """Name and process of each."""
    with make_channel(management) as channel:
        stub = management_pb2_grpc.ManagementStub(channel)
        nodes = stub.ListNodes(management_pb2.ListNodesRequest(), timeout=10.0).nodes
    for role, name in ROLES.items():
        for number, node in enumerate(node for node in nodes if node.role == role):
            yield f"{name}-{number}", node.process_id


def bench() -> None:
    print("memory of each process over some steps, beyond what it has when idle; plan and measured, in MB")
    for model in MODELS:
        for wafers, lane in ((1, "shared_memory"), (2, "shared_memory"), (2, "grpc")):
            for name, figures in measure(model, wafers, lane).items():
                between_hosts = lane == "grpc"
                fits = figures.fits_links if between_hosts else figures.fits
                plan = f"own {figures.planned / 1e6:7.1f}"
                plan += f" links at most {figures.link / 1e6:6.1f}" if between_hosts else " " * 21
                print(
                    f"  {model:11s} {wafers} wafers  {lane:13s}  {name:10s} plan {plan}"
                    f"   measured {figures.measured / 1e6:7.1f}{'' if fits else '  <- not as planned'}"
                )


def input_fn(shape: Sequence[int]) -> Any:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(*shape, generator=generator)
    return DataLoader([batch] * STEPS, batch_size=None)  # type: ignore[arg-type]


def train(model_name: str, wafers: int, lane: str, folder: Path) -> None:
    """First a small model; then, when told to, the model, until standard input ends."""
    import cerebras.pytorch as cstorch

    cluster = cstorch.distributed.ClusterConfig(num_csx=wafers, lane=lane)
    backend = cstorch.backend("CSX", artifact_dir=folder, cluster_config=cluster)
    _train(backend, Small, (64, 64), STEPS)
    print(IDLE, end="", flush=True)
    sys.stdin.readline()
    _train(backend, MODELS[model_name], SHAPES[model_name], MOST_STEPS, lambda: bool(readable([0], 0.0)))


def _train(
    backend: Any, kind: type[nn.Module], shape: Sequence[int], num_steps: int, is_enough: Callable[[], bool] = bool
) -> None:
    import cerebras.pytorch as cstorch

    torch.manual_seed(0)
    with backend.device:
        model = kind()
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.AdamW(model.parameters(), lr=1e-3)

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = compiled(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if isinstance(model, Clipped):
            nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()
        return loss

    @cstorch.step_closure
    def show(loss: torch.Tensor) -> None:
        print(loss.item(), flush=True)

    loader = cstorch.utils.data.DataLoader(input_fn, shape)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=num_steps):
        show(step(batch))
        if is_enough():
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["script", "nodes"])
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("--wafers", type=int, default=1)
    parser.add_argument("--lane", default="auto")
    parser.add_argument("--management")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.what == "nodes":
        for name, process in _nodes(options.management):
            print(name, process)
    elif options.what == "script":
        train(options.model, options.wafers, options.lane, options.folder)
    else:
        bench()


if __name__ == "__main__":
    main()
