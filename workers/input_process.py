"""The worker's side of the process that runs the input_fn: its start, its messages, and its end."""

import contextlib
import io
import json
import os
import pwd
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from waferbox import deadlines, settings
from waferbox.host.descriptors import readable
from waferbox.input_process import foreign
from waferbox.input_process.batch_digest import BATCH_DIGEST_BYTES, BatchDigest
from waferbox.input_process.confinement import DROPPED_VARIABLES
from waferbox.input_process.messages import (
    ARGUMENTS_BYTES,
    DIGEST_BYTES,
    MESSAGE_BYTES,
    MOST_DIGESTS,
    STATE_BYTES,
    BatchLayout,
    Failed,
    Fill,
    Filled,
    InputSettings,
    Load,
    Message,
    MessageError,
    Prepare,
    State,
    decode,
    encode,
)
from waferbox.input_process.temporary_folder import remove_abandoned_folders, remove_shared_memory
from waferbox.launch.installation import user_environment
from waferbox.launch.process import FIRST_FD
from waferbox.launch.spawn import SpawnError, spawn
from waferbox.launch.stop_signals import signal_name
from waferbox.links.hub import Stopped
from waferbox.runtime.node_job import JobFailure
from workers.output import ConsoleReader
from wsc.v1 import node_pb2, plan_pb2

# --- What is known of the first batch ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBatch:
    """The digests of a worker's first batch, as in InputDigests (node.proto); empty with all later batches."""

    digests: Sequence[bytes]
    whole: BatchDigest


# --- The end of a process group ---------------------------------------------------------------------------------------


def end_group(leader: int) -> None:
    """Kills the processes of a group, waits for their end, and removes the shared memory that they leave behind.

    Waits deadlines.INPUT_PROCESS.group at most, since a process that reads from a hanging disk cannot be killed. Raises
    ProcessLookupError if the leader has ended already.
    """
    if os.getpgid(leader) != leader:
        return  # The process has not made its group yet, so it has started no other.
    with contextlib.ExitStack() as closing:
        os.killpg(leader, signal.SIGSTOP)  # so that none makes a process or a semaphore that is not found here
        members = {}
        for pid in _members(leader):
            with contextlib.suppress(ProcessLookupError):
                members[pid] = os.pidfd_open(pid)
                closing.callback(os.close, members[pid])
        semaphores = _named_semaphores(members)
        os.killpg(leader, signal.SIGKILL)
        deadline = time.monotonic() + deadlines.INPUT_PROCESS.group
        for pid, pidfd in members.items():
            if readable([pidfd], max(0.0, deadline - time.monotonic())):
                remove_shared_memory(pid)
        for path in semaphores:
            path.unlink(missing_ok=True)


def _named_semaphores(processes: Iterable[int]) -> list[Path]:
    """Returns the semaphores of multiprocessing that some of these processes have mapped and that still have a name.

    A process of multiprocessing removes them at the end of the others, but is killed with these. They are compared by
    inode: in the process that makes a semaphore, the mapping has the name that glibc gives the file first, and for a
    moment that is its only name.
    """
    inodes: set[int] = set()
    for pid in processes:
        with contextlib.suppress(OSError):  # It has ended, or is another user's.
            mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes.update(int(line.split()[4]) for line in mapped if "/dev/shm/sem." in line)
    found = []
    for path in Path("/dev/shm").glob("sem.*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino in inodes:
                found.append(path)
    return found


def _members(group: int) -> list[int]:
    """Returns the processes of a group that are visible to this process."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(name)) == group:
                found.append(int(name))
    return found


# --- The process of an input_fn ---------------------------------------------------------------------------------------


class _Process(Protocol):
    """A child process: a waferbox.launch.spawn.Child, or one under another interpreter."""

    @property
    def pid(self) -> int: ...
    def fileno(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout_seconds: float | None = None) -> int: ...
    def close(self) -> int: ...


class InputProcess:
    """A process that runs one input_fn, and the socket to it. waferbox.input_process describes the messages.

    Used by one thread at a time. Raises JobFailure: of KIND_INPUT, with the user's traceback, if the input_fn or its
    loader failed, or the process ended; of KIND_NODE if that cannot be started, or it or a process of the loader was
    killed, since another node could do its work.
    """

    def __init__(self, request: node_pb2.PrepareInput, on_defect: Callable[[Exception], None]) -> None:
        """Starts the process. on_defect(error) is called if the thread that reads its output ends with an error."""
        prepare, user = prepare_message(request), input_user()
        script_arguments = _script_arguments(request.script_arguments)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # On another host, or in a container, the script's interpreter need not be there.
            wanted = os.fsdecode(request.interpreter)
            interpreter = wanted if os.access(wanted, os.X_OK) else sys.executable
            self._note = (
                f" (it ran under {interpreter}, for {wanted} is not on {socket.gethostname()})"
                if wanted and interpreter != wanted
                else ""
            )
            self._output = ConsoleReader(on_defect)
            try:
                self._process = _start(interpreter, [theirs.fileno(), self._output.writer], user)
            except (SpawnError, OSError) as error:
                self._connection.close()
                self._output.close()
                message = f"the process for the input_fn cannot be started: {error}"
                raise JobFailure(node_pb2.Failure.KIND_NODE, message, is_unfit=True) from error
            finally:
                self._output.close_writer()
        try:
            self._poller = select.poll()
            self._poller.register(self._connection, select.POLLIN)
            self._poller.register(self._process.fileno(), select.POLLIN)
            self._prepare(prepare, request.builder, script_arguments)
        except BaseException:
            self.close()
            raise

    def _prepare(self, message: Prepare, builder: bytes, script_arguments: Sequence[str]) -> None:
        with (
            _memory_file("builder", builder) as recipe,
            _memory_file("argv", json.dumps(script_arguments).encode()) as argv,
        ):
            self._send(message, [recipe.fileno(), argv.fileno()])

    def load(
        self,
        layout: BatchLayout,
        ring: int,
        state_steps: Sequence[int],
        *,
        done_steps: int = 0,
        input_states: Sequence[bytes] = (),
    ) -> None:
        """Sends the layout of batches, and the ring of slots.

        Args:
            layout: the layout of a batch and of the ring.
            ring: the file descriptor of the ring.
            state_steps: the steps before that of the first batch after which the loader's state is sent.
            done_steps: the steps whose batches are not needed.
            input_states: the states of all workers' loaders after these, to resume from; empty: batches are skipped.
        """
        message = Load(layout=layout, done_steps=done_steps, state_steps=tuple(state_steps))
        if not input_states:
            self._send(message, [ring])
            return
        with _memory_file("states", b"[" + b",".join(input_states) + b"]") as states:
            self._send(message, [ring, states.fileno()])

    def request_batch(self, slot: int, state_steps: Sequence[int], recovery_step: int = 0) -> None:
        """Requests the next batch.

        Args:
            slot: the slot for the batch.
            state_steps: the steps, from the batch's to before the next one's, after which the loader's state is sent.
            recovery_step: one more such step, or 0. Its state is empty if the loader cannot be resumed.
        """
        self._send(Fill(slot=slot, state_steps=tuple(state_steps), recovery_step=recovery_step))

    def wait_filled(self, slot: int, stop: int, on_state: Callable[[int, bytes], None]) -> FirstBatch:
        """Waits until a slot is filled; returns what InputDigests in node.proto has, or nothing, of the first batch.

        Args:
            slot: the slot of the oldest request.
            stop: a file descriptor that becomes readable when the wait must end with Stopped.
            on_state: called with the step and the state for each state that arrives.
        """
        message, state = self._wait_message(stop)
        while isinstance(message, State):
            on_state(message.step, state)
            message, state = self._wait_message(stop)
        if message.slot != slot:
            raise _unexpected(message)
        try:
            return FirstBatch(
                digests=[bytes.fromhex(text)[:DIGEST_BYTES] for text in message.digests[:MOST_DIGESTS]],
                whole=BatchDigest(*(bytes.fromhex(text)[:BATCH_DIGEST_BYTES] for text in message.first_batch)),
            )
        except (TypeError, ValueError) as error:
            raise _unexpected(message) from error

    def wait_state(self, stop: int) -> tuple[int, bytes]:
        """Returns the next state and its step; called when all requested batches have arrived. Raises Stopped."""
        message, state = self._wait_message(stop)
        if not isinstance(message, State):
            raise _unexpected(message)
        return message.step, state

    def _wait_message(self, stop: int) -> tuple[Filled | State, bytes]:
        """Returns the next message, and the state that a State carries."""
        self._poller.register(stop, select.POLLIN)
        try:
            ready = {descriptor for descriptor, _ in self._poller.poll()}
        finally:
            self._poller.unregister(stop)
        if stop in ready:
            raise Stopped
        received = self._receive() if self._connection.fileno() in ready else None
        if received is None:
            raise self._ended()
        message, state = received
        match message:
            case Filled() | State():
                return message, state
            case Failed():
                kind = node_pb2.Failure.KIND_NODE if message.killed else node_pb2.Failure.KIND_INPUT
                raise JobFailure(kind, f"{message.message}{self._note}", traceback=message.traceback)
            case _:
                raise _unexpected(message)

    def close(self) -> None:
        """Ends the process and those that it has started."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):  # The process may end before the call.
            if self._process.poll() is None:
                end_group(self._process.pid)
        self._process.close()
        remove_abandoned_folders()
        self._output.close()

    def _send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        data = encode(message)
        if len(data) > MESSAGE_BYTES:
            what = type(message).__name__.lower()
            raise JobFailure(
                node_pb2.Failure.KIND_USER, f"{len(data)} bytes of {what} settings are too many for a worker"
            )
        # If the process has ended, the next wait raises the reason.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._connection, [data], list(descriptors))

    def _receive(self) -> tuple[Message, bytes] | None:
        """Returns the message that has arrived, and the state that a State carries; None if the socket is closed."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
        except ConnectionResetError:
            # The process ended with requests unread. What it has sent before is still there.
            data, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
        with contextlib.ExitStack() as files:
            for descriptor in descriptors:
                files.callback(os.close, descriptor)
            if not data:
                return None
            try:
                message = decode(data)
            except MessageError as error:
                raise _unexpected(data) from error
            return message, _read_state(descriptors) if isinstance(message, State) else b""

    def _ended(self) -> JobFailure:
        try:
            status = self._process.wait(deadlines.INPUT_PROCESS.end)
        except TimeoutError:
            message = "the process of the input_fn closed its socket to the worker"
            return JobFailure(node_pb2.Failure.KIND_INPUT, message)
        if status >= 0:
            message = f"the process of the input_fn ended with exit status {status}; did the input_fn call os._exit?"
            return JobFailure(node_pb2.Failure.KIND_INPUT, message)
        hint = ", perhaps for want of memory" if -status == signal.SIGKILL else ""
        how = f"was killed by {signal_name(-status)}{hint}"
        return JobFailure(node_pb2.Failure.KIND_NODE, f"the process of the input_fn {how}")


def prepare_message(request: node_pb2.PrepareInput) -> Prepare:
    """Returns the message of a request. Raises JobFailure for an unknown number format."""
    input_settings = InputSettings(
        worker=request.worker,
        num_workers=max(1, request.num_workers),
        wafer=request.wafer,
        num_csx=max(1, request.num_csx),
        half_type=_half_name(request),
        mixed_precision=request.mixed_precision,
    )
    return Prepare(
        settings=input_settings,
        python_paths=tuple(map(os.fsdecode, request.python_paths)),
        last_python_paths=tuple(map(os.fsdecode, request.last_python_paths)),
        interpreter_python_paths=tuple(map(os.fsdecode, request.interpreter_python_paths)),
        working_directory=os.fsdecode(request.working_directory),
        redivided=request.redivided,
        input_names=tuple(request.input_names),
        vendor_builder=request.vendor_builder,
    )


def _script_arguments(encoded: Sequence[bytes]) -> Sequence[str]:
    """Returns sys.argv of the script; of one that sent none, that of a Python without a script. Raises JobFailure."""
    size = sum(map(len, encoded))
    if size > ARGUMENTS_BYTES:
        raise JobFailure(
            node_pb2.Failure.KIND_USER,
            f"{size} bytes of sys.argv are too many for a worker, which takes {ARGUMENTS_BYTES}: write what the script "
            "is given to a file, and give it the name of the file",
        )
    return [os.fsdecode(argument) for argument in encoded] or [""]


def _half_name(request: node_pb2.PrepareInput) -> str:
    """Returns the name of the 16 bit format; empty if the request has none. Raises JobFailure for an unknown one."""
    if not request.half_type:
        return ""
    try:
        return plan_pb2.HalfType.Name(request.half_type).removeprefix("HALF_TYPE_").lower()
    except ValueError as error:
        raise JobFailure(node_pb2.Failure.KIND_INTERNAL, f"there is no half {request.half_type}") from error


def _unexpected(message: object) -> JobFailure:
    """Returns the failure of a process that sent an unexpected message. KIND_INPUT, as it runs the user's code."""
    text = f"the process of the input_fn sent an unexpected message: {str(message)[:200]}"
    return JobFailure(node_pb2.Failure.KIND_INPUT, text)


def _memory_file(name: str, content: bytes) -> io.FileIO:
    """Returns a new file in memory, at whose begin it is read."""
    file = io.FileIO(os.memfd_create(name, os.MFD_CLOEXEC), "r+")
    file.write(content)
    file.seek(0)
    return file


def _read_state(descriptors: Sequence[int]) -> bytes:
    """Returns the content of the file of a State. The process runs the user's code and may have sent anything."""
    for descriptor in descriptors:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size <= STATE_BYTES:
            return os.pread(descriptor, STATE_BYTES, 0)
    raise JobFailure(node_pb2.Failure.KIND_INPUT, "the process of the input_fn sent something else than a state")


class _ForeignPython:
    """A process of an input_fn under another interpreter than the worker's."""

    def __init__(self, interpreter: str, descriptors: Sequence[int], user: str) -> None:
        command = [interpreter, str(Path(foreign.__file__)), *_arguments(descriptors, user)]
        inherited = user_environment(os.environ)
        environment = {name: value for name, value in inherited.items() if name not in DROPPED_VARIABLES}
        self._popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=descriptors, env=environment, start_new_session=True
        )
        self._pidfd = os.pidfd_open(self._popen.pid)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def fileno(self) -> int:
        return self._pidfd

    def poll(self) -> int | None:
        return self._popen.poll()

    def wait(self, timeout_seconds: float | None = None) -> int:
        try:
            return self._popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(str(error)) from error

    def close(self) -> int:
        self._popen.kill()
        try:
            return self._popen.wait()
        finally:
            os.close(self._pidfd)


def _start(interpreter: str, descriptors: Sequence[int], user: str) -> _Process:
    """Starts a process. descriptors: the socket and the output. user: the process's user; empty: the worker's own."""
    if _is_own_interpreter(interpreter):
        return spawn("waferbox.input_process", _arguments([FIRST_FD, FIRST_FD + 1], user), fds=descriptors)
    return _ForeignPython(interpreter, descriptors, user)


def _arguments(descriptors: Sequence[int], user: str) -> list[str]:
    user_option = ["--user", user] if user else []
    return ["--socket", str(descriptors[0]), "--output", str(descriptors[1]), *user_option]


def input_user() -> str:
    """Returns the user of the processes of input_fns, from $WAFERBOX_INPUT_USER; empty: the worker's own.

    Raises JobFailure if there is no such user, or if the worker may not start processes of other users.
    """
    user = settings.INPUT_USER.get()
    problem = "only a worker that runs as root can start it so" if user and os.geteuid() else ""
    if user and not problem:
        try:
            pwd.getpwnam(user)
        except KeyError:
            problem = "there is no such user where the worker runs"
    if problem:
        variable = f"{settings.INPUT_USER.name} of the worker"
        message = f"the process for the input_fn is to be of the user {user!r} ({variable}): {problem}"
        raise JobFailure(node_pb2.Failure.KIND_USER, message)
    return user


def _is_own_interpreter(interpreter: str) -> bool:
    """Whether an interpreter is this process's: the same program in the same environment."""
    here, there = Path(sys.executable), Path(interpreter)
    return there.parent.resolve() == here.parent.resolve() and there.resolve() == here.resolve()
