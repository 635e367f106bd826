"""What recovery points cost a process that keeps states: of a model as large as GPT-2 small, with AdamW.

First the rates at which a point is written, copied by another process, and put back. Then steps with points, and with
points that are copied, against steps without, in turns: a step computes for a while and updates the states from the
last layer to the first, with one thread, as a shard has. Points are kept far more often than in earnest; what they
would cost every 30 s is computed from that. Last the training of that model, with a point every 30 s.
"""

import math
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

from benchmarks.checkpoints import SHAPES
from benchmarks.recovery_copier import JOB, OWNER, Copier, new_copier
from benchmarks.runs import run_side
from benchmarks.show import show, show_pairs
from waferbox.rpc.address import bind
from waferbox.rpc.server import make_server
from waferbox.runtime.progress import Progress
from waferbox.states.layout import StateRequirements
from waferbox.states.point_copies import owner_name
from waferbox.states.point_folders import find_point
from waferbox.states.point_shares import PointShares
from waferbox.states.state_memory import StateSettings
from waferbox.states.state_service import StateService
from waferbox.states.store import Snapshots, StateStore
from wsc.v1 import node_pb2, node_pb2_grpc, plan_pb2

COMPUTE_SECONDS = 1.0  # of a step
ROUND_SECONDS = 15.0
POINT_SECONDS = 5.0  # between points
IN_EARNEST_SECONDS = 30.0
TRAINED_STEPS = 45  # one or two minutes
MOMENTS = ("weight", "exp_avg", "exp_avg_sq")
FLOAT = plan_pb2.ELEMENT_TYPE_FLOAT32


class Shard:
    """The states, their points, and steps."""

    def __init__(self, folder: Path) -> None:
        self.kept: queue.Queue[node_pb2.RecoveryPointKept] = queue.Queue()
        self.store = StateStore(StateSettings())
        member = folder / JOB / OWNER
        self.points = PointShares(self.store, lambda: member, owner_name(JOB, OWNER), self._tell, print)
        self.copier: Copier | None = None  # that copies what is kept
        self.ordered: queue.SimpleQueue[int] = queue.SimpleQueue()  # copies
        service = StateService()
        service.add_job(
            JOB, self.store, Snapshots(self.store, print), lambda: True, lambda *of: find_point(folder, JOB, *of), print
        )
        self._server = make_server()
        node_pb2_grpc.add_StateServiceServicer_to_server(service, self._server)
        self.address = bind(self._server, "127.0.0.1:0")
        self._server.start()
        self._progress = Progress("update")
        self._number = 0
        self._matrix = torch.randn(1024, 1024)
        self._gradients = {shape: torch.randn(shape) for shape in set(SHAPES)}

    def _tell(self, kept: node_pb2.RecoveryPointKept) -> None:
        self.kept.put(kept)
        if self.copier is not None:
            self.copier.copy(kept.recovery_point)
            self.ordered.put(kept.recovery_point)

    def load(self, number: int = 0) -> None:
        names = [f"{number}.{moment}" for number in range(len(SHAPES)) for moment in MOMENTS]
        shapes = [shape for shape in SHAPES for _ in MOMENTS]
        slots = [
            plan_pb2.StateSlot(value=value, name=name, type=plan_pb2.TensorType(element_type=FLOAT, shape=shape))
            for value, (name, shape) in enumerate(zip(names, shapes, strict=True), 1)
        ]
        # A step updates the layers from the last to the first.
        firsts = reversed(range(0, len(names), len(MOMENTS)))
        write_order = [name for first in firsts for name in names[first : first + len(MOMENTS)]]
        missing = self.points.load(StateRequirements(slots=slots, write_order=write_order), number)
        for name in missing:
            self.store.tensor(name).normal_()
        self.store.mark_written(missing)

    def keep(self) -> int:
        self._number += 1
        self.points.expect(node_pb2.Start(last_recovery_point=self._number))
        self.points.keep_last(self._progress)
        self.points.drop(self._number - 1)
        return self._number

    def step(self) -> None:
        end = time.perf_counter() + COMPUTE_SECONDS
        while time.perf_counter() < end:
            self._matrix @ self._matrix
        for number, shape in reversed(list(enumerate(SHAPES))):
            names = [f"{number}.{moment}" for moment in MOMENTS]
            if self.store.copies_on_write:
                self.store.before_write(names)
            states = [[self.store.tensor(name)] for name in names]
            torch._fused_adamw_(
                states[0], [self._gradients[shape]], states[1], states[2], [], [torch.tensor(3.0)],
                lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip

    def close(self) -> None:
        self._server.stop(None).wait()
        self.points.drop(2**64 - 1)
        self.points.close()
        self.store.close()


@contextmanager
def new_shard(folder: Path) -> Iterator[Shard]:
    shard = Shard(folder)
    try:
        yield shard
    finally:
        shard.close()


def steps_per_second(shard: Shard, *, with_points: bool) -> float:
    done, begin = 0, time.perf_counter()
    due = begin
    while (now := time.perf_counter()) < begin + ROUND_SECONDS:
        if with_points and now >= due:
            shard.keep()
            due += POINT_SECONDS
        shard.step()
        done += 1
    return done / (time.perf_counter() - begin)


def rates(shard: Shard, copier: Copier, repeats: int) -> None:
    nbytes = sum(place.nbytes for place in shard.store.extents().values())
    state = memoryview(bytearray(1 << 20))
    written, copied, read, checked = [], [], [], []
    for _ in range(repeats):
        shard.step()  # what is unchanged is not written
        number = shard.keep()
        kept = shard.kept.get()
        written.append(kept.nbytes / kept.seconds / 1e9)
        copier.copy(number)
        copied.append(kept.nbytes / copier.seconds() / 1e9)
        begin = time.perf_counter()
        shard.load(number)
        read.append(nbytes / (time.perf_counter() - begin) / 1e9)
        begin = time.perf_counter()
        checksum = xxhash.xxh3_64()
        for _ in range(1000):
            checksum.update(state)
        checked.append(1000 * len(state) / (time.perf_counter() - begin) / 1e9)
    print(f"a recovery point of {nbytes / 1e9:.2f} GB")
    show("is kept, while nobody computes", written, "GB/s")
    show("is copied, and checked", copied, "GB/s")
    show("is put back, from the system's cache", read, "GB/s")
    show("  checksums alone", checked, "GB/s")


def bench(repeats: int) -> None:
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
        new_shard(Path(folder, "own")) as shard,
        new_copier(Path(folder, "another"), shard.address) as copier,
    ):
        shard.load()
        rates(shard, copier, repeats)
        with_points: list[float] = []
        with_copies: list[float] = []
        without: list[float] = []
        kept: list[float] = []
        copied: list[float] = []
        for _ in range(repeats):
            without.append(steps_per_second(shard, with_points=False))
            with_points.append(steps_per_second(shard, with_points=True))
            kept += [shard.kept.get().seconds for _ in range(shard.kept.qsize())]
            shard.copier = copier
            with_copies.append(steps_per_second(shard, with_points=True))
            shard.copier = None
            while not shard.ordered.empty():
                shard.ordered.get()
                copied.append(copier.seconds())
        print(f"steps with a point every {POINT_SECONDS:g} s")
        show_pairs("with points", with_points, "without", without, "steps/s")
        show("until a point is kept", kept, "s")
        _show_cost(with_points, without)
        show_pairs("with points that are copied", with_copies, "without", without, "steps/s")
        show("until a copy is made", [seconds for seconds in copied if not math.isnan(seconds)], "s")
        _show_cost(with_copies, without)
    bench_training(repeats)


def bench_training(repeats: int) -> None:
    """A model that is trained on a cluster, with points as often as in earnest, and with none."""
    print(f"GPT-2 small on a cluster, {TRAINED_STEPS} steps, a point every {IN_EARNEST_SECONDS:g} s")
    with_points: list[float] = []
    without: list[float] = []
    for _ in range(repeats):
        for found, variables in (
            (without, {"WAFERBOX_MAX_NUM_RESTARTS": "0"}),
            (with_points, {"WAFERBOX_RECOVERY_SECONDS": f"{IN_EARNEST_SECONDS:g}"}),
        ):
            run = run_side("gpt2_training", "cluster", 1, TRAINED_STEPS, **variables)
            found.append(run["tokens_per_second_of_all"])
    show_pairs("with points", with_points, "without", without, "tokens/s")


def _show_cost(with_points: Sequence[float], without: Sequence[float]) -> None:
    ratio = statistics.median(a / b for a, b in zip(with_points, without, strict=True))
    cost = (1 - ratio) * POINT_SECONDS / IN_EARNEST_SECONDS
    print(f"  every {IN_EARNEST_SECONDS:g} s that would be {cost:.2%} of the step rate")
