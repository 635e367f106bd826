"""The input_fns of the tests, imported by name in the process of the input_fn."""

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


class Counting:
    """A loader whose values are the numbers of their batch and row."""

    def __init__(self, rows: int, columns: int, length: int = 5) -> None:
        self.rows, self.columns, self.length = rows, columns, length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            rows = number * 100 + torch.arange(self.rows)
            yield rows.float().unsqueeze(1).expand(self.rows, self.columns), rows


def counting(rows: int, columns: int = 3, length: int = 5) -> Counting:
    return Counting(rows, columns, length)


class Restartable(Counting):
    """An endless loader that resumes after the batches that were taken."""

    batch = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            rows = self.batch * 100 + torch.arange(self.rows)
            self.batch += 1
            yield rows.float().unsqueeze(1).expand(self.rows, self.columns), rows

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]

    def aggregate_state_dict(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return states[0]

    def deaggregate_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return state


def sending(rows: int, message: bytes) -> Counting:
    """Sends a message to the worker, which an input_fn must not do."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.type == socket.SOCK_SEQPACKET:
                connection.send(message)
    return counting(rows)


def restartable(rows: int) -> Restartable:
    return Restartable(rows, 3)


def random_rows(rows: int) -> torch.utils.data.DataLoader[Any]:
    """A shuffled torch DataLoader with worker processes of its own."""
    values = torch.arange(8 * rows)
    dataset = torch.utils.data.TensorDataset(values.float().unsqueeze(1).expand(-1, 3).contiguous(), values)
    return torch.utils.data.DataLoader(dataset, batch_size=rows, shuffle=True, num_workers=2, drop_last=True)


def spawned_rows(rows: int) -> torch.utils.data.DataLoader[Any]:
    """As random_rows, but its processes are spawned, and share semaphores that have names."""
    return _rows_of_processes(rows, "spawn")


def rows_of_a_fork_server(rows: int) -> torch.utils.data.DataLoader[Any]:
    """As spawned_rows, but a fork server makes the processes, which takes it a while."""
    return _rows_of_processes(rows, "forkserver")


def _rows_of_processes(rows: int, context: str) -> torch.utils.data.DataLoader[Any]:
    values = torch.arange(8 * rows)
    dataset = torch.utils.data.TensorDataset(values.float().unsqueeze(1).expand(-1, 3).contiguous(), values)
    return torch.utils.data.DataLoader(
        dataset, batch_size=rows, num_workers=1, drop_last=True, multiprocessing_context=context
    )


def random_rows_without_signals(rows: int) -> torch.utils.data.DataLoader[Any]:
    """As random_rows, but torch misses its batch before it learns that a process of the loader has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    return random_rows(rows)


def half_handed_over(link: str) -> Any:
    """A loader whose process has a named batch in shared memory, which a kill would leave behind."""
    if os.fork() == 0:
        batch = Path(f"/dev/shm/torch_{os.getpid()}_1_1")
        batch.touch()
        Path(link).symlink_to(batch)
        time.sleep(600.0)
    time.sleep(600.0)


class RandomRows(torch.utils.data.Dataset[Any]):
    """A dataset that draws from all random generators, as augmentations do."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        drawn = index + 100 * random.randrange(100) + 10_000 * int(torch.randint(100, ()))
        return torch.full((3,), float(drawn)), drawn


def augmented_rows(rows: int, num_processes: int) -> torch.utils.data.DataLoader[Any]:
    """Returns a loader with five batches a pass."""
    dataset = RandomRows(5 * rows + 1)
    return torch.utils.data.DataLoader(
        dataset, batch_size=rows, shuffle=True, num_workers=num_processes, drop_last=True
    )


class Sampled(torch.utils.data.DataLoader[Any]):
    """A loader whose state is the number of samples of all workers together."""

    before = 0

    def state_dict(self) -> dict[str, Any]:
        from cstorch.distributed import get_worker_state

        return {"own": get_worker_state().samples_streamed, "before": self.before}

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"samples": worker_states[0]["before"] + sum(state["own"] for state in worker_states)}

    def deaggregate_state_dict(self, aggregated_state_dict: dict[str, Any]) -> dict[str, Any]:
        return aggregated_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from cstorch.utils.data import DistributedSampler

        self.before = state_dict["samples"]
        assert isinstance(self.batch_sampler, DistributedSampler)
        self.batch_sampler.set_state(self.before)


def sampled(rows: int, num_processes: int = 0) -> Sampled:
    """Returns a loader of the worker's share of five batches a pass, in the order of a DistributedSampler."""
    from cstorch.utils.data import DistributedSampler

    values = torch.arange(5 * rows + 3)
    dataset = torch.utils.data.TensorDataset(values.float().unsqueeze(1).expand(-1, 3).contiguous(), values)
    sampler = DistributedSampler(dataset, batch_size=rows)
    return Sampled(dataset, batch_sampler=sampler, num_workers=num_processes)


def raising() -> None:
    raise_here()


def raise_here() -> None:
    raise ValueError("no such file: mnist.gz")


def leaving_later(rows: int) -> Iterator[Any]:
    """As raising_later, with sys.exit."""
    for number, batch in enumerate(Counting(rows, 3)):
        if number == 2:
            sys.exit("enough")
        yield batch


def interrupted() -> None:
    raise KeyboardInterrupt


def raising_later(rows: int) -> Iterator[Any]:
    for number, batch in enumerate(Counting(rows, 3)):
        if number == 2:
            raise_here()
        yield batch


def exiting_later(rows: int) -> Iterator[Any]:
    """Ends the process at the third batch."""
    for number, batch in enumerate(Counting(rows, 3)):
        if number == 2:
            os._exit(3)
        yield batch


def once(rows: int) -> Iterator[Any]:
    yield from Counting(rows, 3, 2)


def not_a_loader() -> int:
    return 3


def leaving() -> None:
    os._exit(3)


def slow(seconds: float) -> Counting:
    time.sleep(seconds)
    return Counting(4, 3)


def with_a_process_of_its_own(pid_file: str) -> Counting:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(pid_file, "w") as file:
        file.write(f"{os.getpid()} {process.pid}")
    return Counting(4, 3)


def describing(path: str) -> Counting:
    """Writes the facts about the worker that an input_fn can read to a file."""
    drawn = random.random(), torch.rand(()).item()
    from cstorch import distributed  # its import draws random numbers too

    with open(path, "w") as file:
        print(os.getcwd(), sys.path[0], file=file)
        print(distributed.is_streamer(), distributed.num_streamers(), file=file)
        print(distributed.get_streaming_rank(), distributed.get_streaming_batch_size(8), file=file)
        print(*drawn, file=file)
    return Counting(4, 3)


def of_parsed_arguments(context: str) -> torch.utils.data.DataLoader[Any]:
    """Imports a module that parses sys.argv, here and in a process of the loader."""
    import parsed_arguments  # type: ignore[import-not-found]  # in the folder that the test makes

    return torch.utils.data.DataLoader(
        parsed_arguments.Samples(), parsed_arguments.ROWS, num_workers=1, multiprocessing_context=context
    )


def without_arguments(rows: int) -> Counting:
    assert sys.argv == [""], sys.argv
    return counting(rows)


def describing_precision(path: str) -> Counting:
    """Writes the number formats that an input_fn can read to a file."""
    from cstorch import amp

    with open(path, "w") as file:
        print(amp.mixed_precision(), amp.get_half_dtype_str(), amp.get_half_dtype(), file=file)
        print(amp.get_floating_point_dtype(), amp.get_floating_point_dtype_str(), file=file)
    return Counting(4, 3)


def printing(rows: int) -> Counting:
    """Prints in every possible way, and far too much."""
    print("made by", "print")
    logging.getLogger("mine").warning("a warning of mine")
    os.write(1, b"\xff not text\r50%\r100%\n")
    sys.stderr.write("x" * 10_000 + "\n")
    for number in range(20_000):
        print(number)
    time.sleep(1.1)
    print("unfinished", end="", flush=True)
    return counting(rows, 3, 2)


def describing_its_process(path: str) -> Counting:
    """Writes the descriptors, variables and rights that its process has inherited to a file."""
    import json
    import resource

    descriptors = {int(name) for name in os.listdir("/proc/self/fd")}
    kept = {}
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # the one of listdir
            kept[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
    began_with = ""
    with contextlib.suppress(PermissionError), open("/proc/self/environ") as file:  # a user who has become another
        began_with = file.read()
    with open("/proc/self/status") as status, open(path, "w") as file:
        facts = {
            "descriptors": kept,
            "environment": dict(os.environ),
            "began_with": began_with,
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "no_new_privileges": "NoNewPrivs:\t1" in status.read(),
            "users": [os.getuid(), os.geteuid(), *os.getgroups()],
        }
        json.dump(facts, file)
    return Counting(4, 3)
