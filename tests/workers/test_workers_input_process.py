"""The input_fn's process, through the worker's side of it."""

import contextlib
import gc
import mmap
import os
import random
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import input_functions
import numpy as np
import psutil
import pytest
import torch
from link_pairs import raise_defect

from waferbox import settings
from waferbox.host.descriptors import readable
from waferbox.input_process import messages
from waferbox.input_process.messages import BatchLayout, TensorLayout
from waferbox.launch.fork_server_process import ForkServerProcess
from waferbox.links.hub import Stopped
from waferbox.runtime.node_job import JobFailure
from workers import input_process
from workers.input_process import InputProcess, _members, _named_semaphores, _read_state
from wsc.v1 import node_pb2, plan_pb2

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("forked")]

ROWS = 4
SLOT_BYTES = 4096
SLOTS = 2
LAYOUT = BatchLayout(
    members=(
        TensorLayout(dtype="float32", shape=(ROWS, 3), offset=0),
        TensorLayout(dtype="int64", shape=(ROWS,), offset=64),
    ),
    global_rows=ROWS,
    local_rows=ROWS,
    micro_batches=1,
    slot_bytes=SLOT_BYTES,
    num_slots=SLOTS,
)


Prepare = Callable[..., node_pb2.PrepareInput]


class Harness:
    """A process, its ring, and the file descriptor that stops waits."""

    def __init__(self, request: node_pb2.PrepareInput) -> None:
        self.process = InputProcess(request, raise_defect)
        self.stop = os.eventfd(0)
        ring = os.memfd_create("ring")
        os.truncate(ring, SLOT_BYTES * SLOTS)
        self.memory = mmap.mmap(ring, SLOT_BYTES * SLOTS)
        self.process.load(LAYOUT, ring, [])
        os.close(ring)
        self.asked = 0
        self.states: dict[int, bytes] = {}

    def batch(self) -> list[float]:
        """The second tensor of the next batch; the first must agree with it."""
        slot = self.asked % SLOTS
        self.asked += 1
        self.process.request_batch(slot, [])
        self.process.wait_filled(slot, self.stop, self.states.__setitem__)
        values = np.frombuffer(self.memory, np.float32, ROWS * 3, slot * SLOT_BYTES).reshape(ROWS, 3)
        rows = np.frombuffer(self.memory, np.int64, ROWS, slot * SLOT_BYTES + 64)
        assert (values == rows[:, None]).all()
        return rows.tolist()

    def close(self) -> None:
        self.process.close()
        os.close(self.stop)


@contextlib.contextmanager
def running(request: node_pb2.PrepareInput) -> Iterator[Harness]:
    harness = Harness(request)
    try:
        yield harness
    finally:
        harness.close()


def test_batches_in_order_pass_after_pass(prepare: Prepare) -> None:
    with running(prepare(input_functions.counting, ROWS, 3, 2)) as harness:
        assert [harness.batch()[0] for _ in range(5)] == [0, 100, 0, 100, 0]


def test_a_function_of_the_script_itself(prepare: Prepare) -> None:
    """Pickled by value: its module does not exist in the child."""

    def local_input_fn(rows: int) -> Any:
        return [(torch.full((rows, 3), 7.0), torch.full((rows,), 7))]

    local_input_fn.__module__ = "__main__"
    with running(prepare(local_input_fn, ROWS, python_paths=[])) as harness:
        assert harness.batch() == [7] * ROWS


def test_a_module_of_the_script_that_makes_the_backend(prepare: Prepare, tmp_path: Path) -> None:
    """There is no cluster of the name that it gives: the backend does not look for it."""
    (tmp_path / "has_backend.py").write_text(
        'import os\n\nos.environ["WAFERBOX_MANAGEMENT"] = "nowhere"\n'
        'import cerebras.pytorch\n\nbackend = cerebras.pytorch.backend("CSX")\n'
    )

    def local_input_fn(rows: int) -> Any:
        import has_backend  # type: ignore[import-not-found]  # is in a folder that the test makes

        number = int(has_backend.backend.is_csx)
        return [(torch.full((rows, 3), float(number)), torch.full((rows,), number))]

    local_input_fn.__module__ = "__main__"
    with running(prepare(local_input_fn, ROWS, python_paths=[str(tmp_path), *sys.path])) as harness:
        assert harness.batch() == [1] * ROWS


def test_folders_of_the_script_come_in_the_scripts_order(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the child's interpreter has some of them already, elsewhere."""
    for number, folder in enumerate(("first", "elsewhere", "last")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "only_here.py").write_text(f"NUMBER = {number}\n")
    first, elsewhere, last = (str(tmp_path / folder) for folder in ("first", "elsewhere", "last"))

    def local_input_fn(rows: int) -> Any:
        import only_here  # type: ignore[import-not-found]  # is in a folder that the test makes

        number = only_here.NUMBER + 10 * sys.path.index(last) // (len(sys.path) - 1)
        return [(torch.full((rows, 3), float(number)), torch.full((rows,), number))]

    local_input_fn.__module__ = "__main__"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([last, elsewhere, first, os.environ.get("PYTHONPATH", "")]))
    with running(prepare(local_input_fn, ROWS, python_paths=[first], last_python_paths=[last])) as harness:
        assert harness.batch() == [10] * ROWS


def test_packages_come_from_the_folder_that_the_script_has_first(prepare: Prepare, tmp_path: Path) -> None:
    """A *.pth file of an environment puts folders before those of the environment that it is made upon."""
    for number, folder in enumerate(("linked", "packages")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "only_here.py").write_text(f"NUMBER = {number}\n")
    linked, packages = (str(tmp_path / folder) for folder in ("linked", "packages"))

    def local_input_fn(rows: int) -> Any:
        import only_here

        return [(torch.full((rows, 3), float(only_here.NUMBER)), torch.full((rows,), only_here.NUMBER))]

    local_input_fn.__module__ = "__main__"
    own = [path for path in sys.path if path]
    for paths, number in (([*own, linked, packages], 0), ([*own, packages, linked], 1)):
        request = prepare(local_input_fn, ROWS, last_python_paths=[linked], interpreter_python_paths=paths)
        with running(request) as harness:
            assert harness.batch() == [number] * ROWS
    # Another interpreter's folders are of no use to this one.
    request = prepare(local_input_fn, ROWS, last_python_paths=[linked], interpreter_python_paths=["/usr/lib/python3.9"])
    with running(request) as harness:
        assert harness.batch() == [0] * ROWS


def test_a_shuffled_torch_loader_gives_what_it_would_here(prepare: Prepare) -> None:
    torch.manual_seed(3)
    with running(prepare(input_functions.random_rows, ROWS)) as harness:
        torch.manual_seed(3)
        loader = input_functions.random_rows(ROWS)
        expected = [batch[1].tolist() for _ in range(2) for batch in loader]
        assert [harness.batch() for _ in range(16)] == expected


@pytest.mark.parametrize(
    ("input_fn", "args", "good", "message", "trace"),
    [
        (input_functions.raising, (), 0, "the input_fn raised ValueError: no such file", ", in raise_here"),
        (
            input_functions.raising_later,
            (ROWS,),
            2,
            r"loader of the input_fn raising_later \(.*input_functions.py:\d+\) raised ValueError: no such file",
            ", in raise_here",
        ),
        (
            input_functions.leaving_later,
            (ROWS,),
            2,
            "raised SystemExit: enough",
            ", in leaving_later",
        ),
        (input_functions.interrupted, (), 0, "the input_fn raised KeyboardInterrupt", ", in interrupted"),
        (input_functions.once, (ROWS,), 2, "ran dry after 2 batches", None),
        (input_functions.not_a_loader, (), 0, "returned int, which is not an iterable", None),
        (input_functions.leaving, (), 0, "ended with exit status 3; did the input_fn call os._exit", None),
        (
            input_functions.counting,
            (3,),
            0,
            r"counting \(.*input_functions.py:\d+\) has 3 rows, .* compiled for 4",
            None,
        ),
    ],
)
def test_failures(
    prepare: Prepare, input_fn: Callable[..., Any], args: tuple[Any, ...], good: int, message: str, trace: str | None
) -> None:
    with running(prepare(input_fn, *args)) as harness:
        for _ in range(good):
            harness.batch()
        with pytest.raises(JobFailure, match=message) as caught:
            harness.batch()
    assert caught.value.kind == node_pb2.Failure.KIND_INPUT
    if trace is None:
        assert caught.value.traceback == ""
    else:
        assert trace in caught.value.traceback
        assert "waferbox/input_process" not in caught.value.traceback


def test_what_a_loader_was_handing_over_goes_with_its_process(prepare: Prepare, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with running(prepare(input_functions.half_handed_over, str(said))):
        deadline = time.monotonic() + 60.0
        while not said.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert said.is_symlink()
    assert not said.exists()


def test_a_killed_process_is_noticed(prepare: Prepare) -> None:
    with running(prepare(input_functions.slow, 600.0)) as harness:
        os.kill(harness.process._process.pid, signal.SIGKILL)
        with pytest.raises(JobFailure, match="killed by SIGKILL, perhaps for want of memory") as caught:
            harness.batch()
    assert (caught.value.kind, caught.value.peer) == (node_pb2.Failure.KIND_NODE, "")


@pytest.mark.parametrize("input_fn", [input_functions.random_rows, input_functions.random_rows_without_signals])
def test_a_killed_process_of_the_loader_is_noticed(prepare: Prepare, input_fn: Callable[..., Any]) -> None:
    with running(prepare(input_fn, ROWS)) as harness:
        harness.batch()
        for process in psutil.Process(harness.process._process.pid).children():
            process.kill()
        with pytest.raises(JobFailure, match="a process of the loader was killed") as caught:
            [harness.batch() for _ in range(20)]
    assert (caught.value.kind, caught.value.peer) == (node_pb2.Failure.KIND_NODE, "")


def temporary_folder(harness: Harness) -> Path:
    """The folder for the temporary files of a process, which holds it open."""
    folders = set()
    for descriptor in Path(f"/proc/{harness.process._process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The process reads batches meanwhile, and closes others.
            folders.add(descriptor.readlink())
    (folder,) = {path for path in folders if path.name.startswith("waferbox-input-")}
    return folder


def test_the_temporary_files_of_a_loader_with_processes_are_removed(prepare: Prepare) -> None:
    with running(prepare(input_functions.counting, ROWS)) as lives:
        lives.batch()
        with running(prepare(input_functions.random_rows, ROWS)) as harness:
            harness.batch()
            folder = temporary_folder(harness)
            assert list(folder.iterdir())  # sockets
        assert not folder.exists()
        assert temporary_folder(lives).exists()


def test_a_semaphore_that_is_being_made_is_found() -> None:
    """glibc gives its file another name first, and a killed process leaves that."""
    path = Path(f"/dev/shm/sem.{secrets.token_hex(3)}")
    with open(path, "xb+") as file:
        try:
            file.write(bytes(32))
            file.flush()
            assert path not in _named_semaphores([os.getpid()])
            with mmap.mmap(file.fileno(), 32):
                assert path in _named_semaphores([os.getpid()])
        finally:
            path.unlink()


@pytest.mark.parametrize("rows", [input_functions.spawned_rows, input_functions.rows_of_a_fork_server])
def test_named_semaphores_of_a_loader_are_removed_with_its_processes(prepare: Prepare, rows: Any) -> None:
    with running(prepare(rows, ROWS)) as harness:
        harness.batch()
        leader = harness.process._process.pid
        semaphores = _named_semaphores([leader])
        assert set(semaphores) == set(_named_semaphores(_members(leader)))
        assert semaphores
        assert all(path.exists() for path in semaphores)
    assert not any(path.exists() for path in semaphores)


def test_temporary_files_of_a_process_that_died_with_its_worker_are_removed_by_the_next(prepare: Prepare) -> None:
    with running(prepare(input_functions.random_rows, ROWS)) as harness:
        harness.batch()
        folder = temporary_folder(harness)
        number = harness.process._process.pid
        group = [number, *(each.pid for each in psutil.Process(number).children(recursive=True))]
        assert len(group) > 1
        ends = [os.pidfd_open(each) for each in group]
        os.killpg(number, signal.SIGKILL)
        for end in ends:  # each that lives yet holds the folder
            assert readable([end], 10.0)
            os.close(end)
        with running(prepare(input_functions.counting, ROWS)) as successor:
            successor.batch()
            assert not folder.exists()


def test_a_wait_is_stopped_and_everything_ends(prepare: Prepare, tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    harness = Harness(prepare(input_functions.with_a_process_of_its_own, str(pid_file)))
    harness.batch()
    processes = [psutil.Process(int(pid)) for pid in pid_file.read_text().split()]
    os.eventfd_write(harness.stop, 1)
    with pytest.raises(Stopped):
        harness.process.wait_filled(0, harness.stop, harness.states.__setitem__)
    begin = time.monotonic()
    harness.close()
    gone, alive = psutil.wait_procs(processes, timeout=5)
    zombies = [process for process in alive if process.status() == psutil.STATUS_ZOMBIE]
    assert len(gone) + len(zombies) == 2
    assert time.monotonic() - begin < 3


def test_what_the_input_fn_sees(prepare: Prepare, tmp_path: Path) -> None:
    random.seed(5)
    torch.manual_seed(5)
    answers = tmp_path / "answers"
    settings = {"wafer": 1, "worker": 2, "num_workers": 3, "num_csx": 2, "working_directory": str(tmp_path)}
    request = prepare(input_functions.describing, str(answers), **settings)
    expected_random = f"{random.random()} {torch.rand(()).item()}"
    harness = Harness(request)
    with contextlib.closing(harness):
        harness.batch()
    assert answers.read_text().splitlines() == [
        f"{tmp_path} {Path(__file__).parent}",
        "True 6",
        "5 4",
        expected_random,
    ]


PARSED_ARGUMENTS = r"""
import argparse
import sys
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, required=True)
parser.add_argument("name")
ARGUMENTS = parser.parse_args()
ROWS = ARGUMENTS.rows

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert sys.argv[0] == "train.py", sys.argv
        assert ARGUMENTS.name.encode("utf-8", "surrogateescape") == b"f\xc3\xbcr \xff", ascii(ARGUMENTS.name)
        return torch.full((3,), float(index)), index
"""


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_module_that_parses_the_arguments_of_the_script(
    prepare: Prepare, tmp_path: Path, context: str, is_foreign: bool
) -> None:
    (tmp_path / "parsed_arguments.py").write_text(PARSED_ARGUMENTS)
    paths = [str(Path(__file__).parent), str(tmp_path)]
    request = prepare(input_functions.of_parsed_arguments, context, python_paths=paths)
    request.script_arguments.extend([b"train.py", b"--rows", b"4", b"f\xc3\xbcr \xff"])
    if is_foreign:
        interpreter = tmp_path / "python"
        interpreter.symlink_to(Path(sys.executable).resolve())
        request.interpreter = os.fsencode(interpreter)
        request.python_paths.append(os.fsencode(Path(torch.__file__).parents[1]))
    with running(request) as harness:
        assert harness.batch() == [0, 1, 2, 3]


def test_the_arguments_of_waferbox_are_hidden_from_an_input_fn_whose_client_sends_none(prepare: Prepare) -> None:
    with running(prepare(input_functions.without_arguments, ROWS)) as harness:
        harness.batch()


def test_too_large_arguments_are_refused(prepare: Prepare) -> None:
    request = prepare(input_functions.counting, ROWS)
    request.script_arguments.append(b"x" * (messages.ARGUMENTS_BYTES + 1))
    with pytest.raises(JobFailure, match=r"bytes of sys\.argv are too many for a worker") as caught:
        InputProcess(request, raise_defect)
    assert caught.value.kind == node_pb2.Failure.KIND_USER


@pytest.mark.parametrize(
    ("half_type", "mixed_precision", "answers"),
    [
        (plan_pb2.HALF_TYPE_BFLOAT16, True, ["True bfloat16 torch.bfloat16", "torch.bfloat16 bfloat16"]),
        (plan_pb2.HALF_TYPE_CBFLOAT16, True, ["True cbfloat16 torch.float16", "torch.float16 cbfloat16"]),
        (plan_pb2.HALF_TYPE_BFLOAT16, False, ["False bfloat16 torch.bfloat16", "torch.float32 float32"]),
        (plan_pb2.HALF_TYPE_UNSPECIFIED, False, ["False float16 torch.float16", "torch.float32 float32"]),
    ],
)
def test_the_input_fn_knows_the_precision_of_the_script(
    prepare: Prepare, tmp_path: Path, half_type: Any, mixed_precision: bool, answers: list[str]
) -> None:
    path = tmp_path / "answers"
    settings = {"half_type": half_type, "mixed_precision": mixed_precision}
    with running(prepare(input_functions.describing_precision, str(path), **settings)) as harness:
        harness.batch()
    assert path.read_text().splitlines() == answers


def test_a_half_that_does_not_exist_is_refused(prepare: Prepare) -> None:
    with pytest.raises(JobFailure, match="there is no half 77"):
        InputProcess(prepare(input_functions.counting, ROWS, half_type=77), raise_defect)


@pytest.mark.parametrize(
    "message",
    [
        b"no JSON",
        b"[]",
        b"{}",
        b'{"kind": []}',
        b'{"kind": "State", "step": "one"}',
        b'{"kind": "State", "step": true}',
        b'{"kind": "Filled", "slot": 7, "digests": [], "first_batch": ["", ""]}',
        b'{"kind": "Filled", "slot": 0, "digests": ["no hex"], "first_batch": ["", ""]}',
        b'{"kind": "Filled", "slot": 0, "digests": {}, "first_batch": ["", ""]}',
        b'{"kind": "Filled", "slot": 0, "digests": [], "first_batch": ["no hex", ""]}',
        b'{"kind": "Filled", "slot": 0, "digests": [], "first_batch": [""]}',
        b'{"kind": "Filled", "slot": 0}',
        b'{"kind": "Fill", "slot": 0, "state_steps": [], "recovery_step": 0}',
        b'{"kind": "Unknown"}',
    ],
)
def test_a_message_of_the_users_code_is_a_failure_of_the_input(prepare: Prepare, message: bytes) -> None:
    with (
        running(prepare(input_functions.sending, ROWS, message)) as harness,
        pytest.raises(JobFailure, match="the process of the input_fn sent an unexpected message") as caught,
    ):
        harness.batch()
    assert caught.value.kind == node_pb2.Failure.KIND_INPUT


def test_a_process_that_cannot_be_prepared_is_ended(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = input_process._start

    def record(*arguments: Any) -> Any:
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(input_process, "_start", record)
    gc.collect()  # closes those of tests before
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(JobFailure, match="are too many for a worker"):
        InputProcess(prepare(input_functions.counting, ROWS, python_paths=["x" * 200_000]), raise_defect)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(started[0].pid).wait(10)  # the fork server takes its exit status
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_another_interpreter(prepare: Prepare, tmp_path: Path) -> None:
    """One that is not the worker's: found by its path, and with nothing of Waferbox but what the path setting names."""
    interpreter = tmp_path / "python"
    interpreter.symlink_to(Path(sys.executable).resolve())
    site = str(Path(torch.__file__).parents[1])
    paths = [str(Path(__file__).parent), site]
    with running(prepare(input_functions.counting, ROWS, interpreter=str(interpreter), python_paths=paths)) as harness:
        assert harness.batch()[0] == 0
        assert shutil.which(str(psutil.Process(harness.process._process.pid).cmdline()[0])) == str(interpreter)


def test_what_is_no_state_is_not_read() -> None:
    reading, writing = os.pipe()
    large = os.memfd_create("state")
    os.truncate(large, messages.STATE_BYTES + 1)
    try:
        for descriptor in (reading, large):
            with pytest.raises(JobFailure, match="sent something else than a state"):
                _read_state([descriptor])
        with pytest.raises(JobFailure, match="sent something else than a state"):
            _read_state([])
    finally:
        for descriptor in (reading, writing, large):
            os.close(descriptor)


def test_an_interpreter_that_is_not_on_this_host(prepare: Prepare) -> None:
    with running(prepare(input_functions.counting, ROWS, interpreter="/nowhere/python")) as harness:
        assert harness.batch()[0] == 0
    with (
        running(prepare(input_functions.raising, interpreter="/nowhere/python")) as harness,
        pytest.raises(JobFailure, match=rf"it ran under {sys.executable}, for /nowhere/python is not on"),
    ):
        harness.batch()


@pytest.mark.parametrize("is_forked", [True, False], ids=["forked", "a Python of its own"])
def test_with_the_fork_server_and_without(
    prepare: Prepare, forked: ForkServerProcess, monkeypatch: pytest.MonkeyPatch, *, is_forked: bool
) -> None:
    if not is_forked:
        monkeypatch.delenv(settings.FORK_SERVER.name)
    with running(prepare(input_functions.random_rows, ROWS)) as harness:
        assert len(harness.batch()) == ROWS
        parent = psutil.Process(harness.process._process.pid).ppid()
        assert parent == (forked.pid if is_forked else os.getpid())
    with (
        running(prepare(input_functions.raising)) as harness,
        pytest.raises(JobFailure, match="no such file") as caught,
    ):
        harness.batch()
    assert "waferbox/input_process" not in caught.value.traceback


def test_batches_that_were_made_before_the_process_ended_arrive(prepare: Prepare) -> None:
    """Although it has left requests unread."""
    with running(prepare(input_functions.exiting_later, ROWS)) as harness:
        for number in range(5):
            harness.process.request_batch(number % SLOTS, [])
        assert harness.process._process.wait(20) == 3
        for number in range(2):
            harness.process.wait_filled(number % SLOTS, harness.stop, harness.states.__setitem__)
        with pytest.raises(JobFailure, match="ended with exit status 3"):
            harness.process.wait_filled(0, harness.stop, harness.states.__setitem__)
