"""Has everything that writes to a disk write to one that is nearly full, and looks at what is there afterwards.

python full_disk_writes.py FOLDER, which is a small disk (tests/shared/full_disk.py).
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from reported_steps import trained_blocks

from appliance.compiler.artifacts import REPORT_DATA, Artifacts, read_plan
from appliance.compiler.core.target import Target
from appliance.compiler.cost.machine_model import machine_model
from cstorch.storage import load, save
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module
from waferbox.host.folders import secret_key
from waferbox.links.shared_memory import SharedMemory
from waferbox.states.kernels import StateKernels

TARGET = Target(num_csx=1, num_shards=1)


class Advice(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("advice").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def taken(self) -> list[str]:
        messages, self.messages = self.messages, []
        return messages


@contextmanager
def room(disk: Path, pages: int) -> Iterator[None]:
    """So many pages are free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        with suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        file.truncate(max(0, file.tell() - pages * os.sysconf("SC_PAGE_SIZE")))
    try:
        yield
    finally:
        filler.unlink()


def nearly_full(disk: Path, step: int) -> Iterator[int]:
    """More and more free pages, each time on a disk that has no others; the caller ends it."""
    for pages in range(0, 10_000, step):
        with room(disk, pages):
            yield pages


def check_artifacts(disk: Path, advice: Advice) -> None:
    text, folder = trained_blocks().text, disk / "artifacts"
    cache = Artifacts(folder, disk / "root")  # its key is there before the disk is full
    kept = []
    for _ in nearly_full(disk, 6):
        key, plan, cached = cache.compile(text, TARGET)
        assert not cached
        messages = advice.taken()
        assert not list(folder.rglob("*.tmp"))
        path = folder / f"{key}.plan"
        kept.append(path.exists())
        assert read_plan(path) == (plan if kept[-1] else None)
        if not messages:
            break
        (message,) = messages
        assert message.startswith(f"The job continues, but its compiled plan cannot be stored in {folder}: No space")
        path.unlink(missing_ok=True)
    assert not kept[0]
    assert kept[-1]
    assert json.loads((folder / key / REPORT_DATA).read_text())["artifact"] == key
    assert cache.compile(text, TARGET) == (key, plan, True)


def check_kernels(disk: Path, advice: Advice) -> None:
    folder = disk / "kernels"
    builder = GraphBuilder()
    x = builder.argument(tensor_type((3, 3), torch.float32))
    (total,) = builder.op("cirh.Add", [x, x])
    text = print_module(builder.finish([(total, None), (builder.op("cirh.Mul", [x, total])[0], None)]))
    states = SharedMemory.create(64)
    for _ in nearly_full(disk, 300):
        StateKernels().make({1: text}, states, folder)
        messages = advice.taken()
        if not messages:
            break
        (message,) = messages
        assert message.startswith(
            f"Updates are compiled anew for each execution, as they cannot be kept in {folder}: No space"
        )
        assert not list(folder.iterdir())
    states.close()
    assert [path.suffix for path in folder.iterdir()] == [".so"]


def check_small_files(disk: Path) -> None:
    folder = disk / "small"
    logging.disable()  # of the key, which is a line for the administrator
    with room(disk, 0):
        with pytest.raises(OSError, match="No space"):
            secret_key(folder / "cluster.key")
        machine_model(folder)
        assert not list(folder.iterdir())
    assert secret_key(folder / "cluster.key") == secret_key(folder / "cluster.key")
    assert [path.name for path in folder.iterdir()] == ["cluster.key"]
    logging.disable(logging.NOTSET)


def check_checkpoints(disk: Path) -> None:
    folder = disk / "checkpoints"
    for tree in ({str(number): torch.randn(3) for number in range(100)}, {str(n): torch.randn(9000) for n in range(5)}):
        former, path = folder / f"former_{len(tree)}.mdl", folder / f"{len(tree)}.mdl"
        save(tree, former)
        refused = 0
        for _ in nearly_full(disk, 7):
            before = sorted(folder.iterdir())
            with suppress(OSError):
                save(tree, path)
                break
            with pytest.raises(OSError, match=r"No space left on device: .* MB are free") as caught:
                save(tree, path)
            assert caught.value.filename == str(path)
            assert sorted(folder.iterdir()) == before
            refused += 1
        assert refused > 3
        for saved in (former, path):
            assert all(torch.equal(tensor, tree[name]) for name, tensor in load(saved).items())


def main(disk: Path) -> None:
    advice = Advice()
    check_artifacts(disk, advice)
    check_kernels(disk, advice)
    check_small_files(disk)
    check_checkpoints(disk)
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
