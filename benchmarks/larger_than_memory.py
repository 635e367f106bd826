"""Training a model whose weights and optimizer state are four times what MemoryX may have of them in memory.

The same training with all of them in memory, and with the states in files of a folder and a limit, in turns. The limit
is what MemoryX had in memory without states in the unlimited run, and a quarter of the states. Says how fast the disk
of the folder is, and where MemoryX's time goes. Linux only.

    python -m benchmarks larger-than-memory
    python -m benchmarks.larger_than_memory --state-dir /nvme/scratch
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import logging
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from benchmarks.gpt2_training import RoleSeconds
from benchmarks.memory import Start, embedded_cluster, start_python
from benchmarks.network import HERE
from benchmarks.runs import ENVIRONMENT
from benchmarks.show import show, show_pairs
from waferbox import settings
from waferbox.links.shared_memory import SharedMemory
from waferbox.roles import role_of
from waferbox.rpc.server import make_channel
from waferbox.states.file_pages import FilePages
from wsc.v1 import management_pb2, management_pb2_grpc

STATE_WORDS: Final = 3  # of AdamW, for each parameter: the weight, and two averages
SHARE: Final = 4  # states are so many times what has room in memory
SAMPLE_SECONDS: Final = 0.02
DISK_BYTES: Final = 1 << 30
RUN_SECONDS: Final = 600.0
REMARKS: Final = "memoryx.paging INFO: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of a model with equal layers, and its batch."""

    layers: int
    width: int
    rows: int
    steps: int

    @property
    def state_bytes(self) -> int:
        return self.layers * (self.width + 1) * self.width * STATE_WORDS * 4


SIZE: Final = Size(layers=8, width=2048, rows=1024, steps=8)


class Deep(nn.Module):
    """Many equal layers."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """What a process had in memory, in bytes."""

    idle: int  # before the training, without shared memory
    own: int  # at most, without shared memory
    all: int  # at most, with shared memory that it has mapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one training shows."""

    losses: Sequence[float]
    checkpoints: Sequence[str]  # digests
    steps_per_second: float
    share_of_time: Mapping[str, Mapping[str, float]]
    resident: Mapping[str, Resident]  # by role
    remarks: Sequence[str]  # of MemoryX, on what it read and wrote


def run(
    size: Size,
    state_dir: Path | None = None,
    limit_bytes: int = 0,
    checkpoint_steps: int = 0,
    hold: Callable[[Mapping[str, int]], None] = lambda processes: None,
    start: Start = start_python,
) -> Run:
    """One training on a cluster of its own.

    Args:
        size: of the model.
        state_dir: where MemoryX keeps the states; None: in memory.
        limit_bytes: of MemoryX; 0: none.
        checkpoint_steps: steps between checkpoints; 0: none is saved.
        hold: called with the processes, by role, before the training begins.
        start: starts the cluster and the script.
    """
    with tempfile.TemporaryDirectory() as name:
        variables = {**os.environ, **ENVIRONMENT, "WAFERBOX_CACHE": f"{name}/cache", "OMP_NUM_THREADS": "1"}
        variables[settings.LOG_LEVEL.name] = "info"
        options = ["--state-dir", str(state_dir)] if state_dir is not None else []
        options += ["--memory-limit", str(limit_bytes)] if limit_bytes else []
        log = Path(name, "log")
        with embedded_cluster(options, variables, log, start) as management:
            processes = _processes(management)
            hold(processes)
            words = ["benchmarks.larger_than_memory", "script", "--folder", f"{name}/model"]
            words += ["--checkpoint-steps", str(checkpoint_steps)]
            words += [word for key in Size.__slots__ for word in (f"--{key}", str(getattr(size, key)))]
            variables["WAFERBOX_MANAGEMENT"] = management
            with (
                open(os.devnull, "rb") as nothing,
                tempfile.TemporaryFile("w+") as output,
                tempfile.TemporaryFile("w+") as errors,
                _watching(processes) as resident,
            ):
                fds = {0: nothing.fileno(), 1: output.fileno(), 2: errors.fileno()}
                status = start(HERE, words, variables, fds).wait(RUN_SECONDS)
                output.seek(0)
                errors.seek(0)
                printed, complained = output.read(), errors.read()
        said = log.read_text()
        if status:
            raise RuntimeError(f"{complained}\n{said}")
        remarks = [line.partition(REMARKS)[2] for line in said.splitlines() if REMARKS in line]
        return Run(**json.loads(printed.splitlines()[-1]), resident=resident, remarks=remarks)


def limit_for(size: Size, unlimited: Run) -> int:
    """A limit under which a quarter of the states has room beside all else."""
    return unlimited.resident["memoryx"].own + size.state_bytes // SHARE


def _bytes(process: int, *kinds: str) -> int:
    """Of a process that lives."""
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{process}/status", encoding="ascii") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))
    return 0


@contextlib.contextmanager
def _watching(processes: Mapping[str, int]) -> Iterator[dict[str, Resident]]:
    """What processes have in memory meanwhile; complete at the end."""
    own, every = ("RssAnon:", "RssFile:"), ("RssAnon:", "RssFile:", "RssShmem:")
    idle = {role: _bytes(process, *own) for role, process in processes.items()}
    found = {role: Resident(idle=nbytes, own=nbytes, all=nbytes) for role, nbytes in idle.items()}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            for role, process in processes.items():
                most = found[role]
                found[role] = Resident(
                    idle=most.idle,
                    own=max(most.own, _bytes(process, *own)),
                    all=max(most.all, _bytes(process, *every)),
                )

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def _processes(management: str) -> dict[str, int]:
    """By role; of a cluster with one of each."""
    with make_channel(management) as channel:
        stub = management_pb2_grpc.ManagementStub(channel)
        nodes = stub.ListNodes(management_pb2.ListNodesRequest(), timeout=10.0).nodes
    return {role_of(node.role).name: node.process_id for node in nodes}


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes a second that the disk of a folder writes and reads, one after the other, past what memory holds."""
    memory = SharedMemory.create_in(folder, DISK_BYTES)
    try:
        pages, chunk = FilePages(memory), 16 << 20
        offsets = range(0, DISK_BYTES, chunk)
        data = memoryview(mmap.mmap(-1, chunk))
        begin = time.perf_counter()
        for offset in offsets:
            os.pwrite(memory.fileno(), data, offset)
            pages.start_writing(offset, chunk)
        os.fdatasync(memory.fileno())
        written = time.perf_counter()
        pages.evict(0, DISK_BYTES)
        start = time.perf_counter()
        pages.read_ahead(0, chunk)
        for offset in offsets:
            pages.read_ahead(min(offset + chunk, DISK_BYTES - chunk), chunk)
            os.preadv(memory.fileno(), [data], offset)
            pages.evict(offset, chunk)
        return DISK_BYTES / (written - begin), DISK_BYTES / (time.perf_counter() - start)
    finally:
        memory.close()


def bench(repeats: int, state_dir: Path | None = None) -> None:
    with tempfile.TemporaryDirectory(dir=state_dir or Path.cwd()) as folder:
        print(
            f"{SIZE.layers} layers of {SIZE.width} x {SIZE.width}, {SIZE.rows} rows, AdamW: "
            f"{SIZE.state_bytes / 1e6:.0f} MB of weights and optimizer state,"
            f" of which MemoryX has room for {SIZE.state_bytes / SHARE / 1e6:.0f} MB"
        )
        rates = [disk_rates(Path(folder)) for _ in range(repeats)]
        show("the disk writes", [written / 1e6 for written, _ in rates], "MB/s")
        show("the disk reads", [read / 1e6 for _, read in rates], "MB/s")
        unlimited, limited = [], []
        for _ in range(repeats):
            unlimited.append(run(SIZE))
            limited.append(run(SIZE, Path(folder), limit_for(SIZE, unlimited[-1])))
            assert limited[-1].losses == unlimited[-1].losses
        show_pairs(
            "a quarter in memory",
            [one.steps_per_second for one in limited],
            "all in memory",
            [one.steps_per_second for one in unlimited],
            "steps/s",
        )
        for what, runs in (("all in memory", unlimited), ("a quarter in memory", limited)):
            print(f"  where the roles' time went, {what}, of the last run:")
            for role, shares in runs[-1].share_of_time.items():
                print(f"    {role:12s}" + ", ".join(f"{part} {share:.1%}" for part, share in shares.items()))
            for remark in runs[-1].remarks:
                print(f"    memoryx-0: {remark}")


def input_fn(rows: int, width: int) -> DataLoader[torch.Tensor]:
    batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    return DataLoader([batch] * 4, batch_size=None)  # type: ignore[arg-type]


def train(size: Size, folder: Path, checkpoint_steps: int) -> dict[str, Any]:
    import cerebras.pytorch as cstorch

    spent = RoleSeconds()
    logger = logging.getLogger("cstorch")
    logger.addHandler(spent)
    logger.setLevel(logging.DEBUG)
    backend = cstorch.backend("CSX", artifact_dir=folder)
    torch.manual_seed(0)
    with backend.device:
        model = Deep(size.layers, size.width)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    times: list[float] = []
    digests: list[str] = []

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = (compiled(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def keep(loss: torch.Tensor) -> None:
        losses.append(loss.item())
        times.append(time.perf_counter())

    @cstorch.checkpoint_closure
    def save() -> None:
        path = folder / "checkpoint.mdl"
        cstorch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, str(path))
        digests.append(_digest(cstorch.load(str(path))))
        path.unlink()

    loader = cstorch.utils.data.DataLoader(input_fn, size.rows, size.width)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=size.steps, checkpoint_steps=checkpoint_steps):
        keep(step(batch))
        save()
    return {
        "losses": losses,
        "checkpoints": digests,
        "steps_per_second": 1 / statistics.median(after - before for before, after in itertools.pairwise(times[1:])),
        "share_of_time": spent.shares(),
    }


def _digest(tree: Any) -> str:
    digest = hashlib.sha256()
    for leaf in torch.utils._pytree.tree_leaves(tree):
        digest.update(leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return digest.hexdigest()


def train_eagerly(size: Size) -> None:
    """The same with plain PyTorch, in this process."""
    torch.manual_seed(0)
    model = Deep(size.layers, size.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = next(iter(input_fn(size.rows, size.width)))
    for _ in range(size.steps):
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["script", "eager"])
    for key in Size.__slots__:
        parser.add_argument(f"--{key}", type=int, default=getattr(SIZE, key))
    parser.add_argument("--checkpoint-steps", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--state-dir", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    size = Size(**{key: getattr(options, key) for key in Size.__slots__})
    if options.what == "script":
        print(json.dumps(train(size, options.folder, options.checkpoint_steps)))
    elif options.what == "eager":
        train_eagerly(size)
    else:
        bench(options.repeats, options.state_dir)


if __name__ == "__main__":
    main()
