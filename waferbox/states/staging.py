"""Initial values of states: programs of the client compute them, several at a time, and they are staged until the plan
says where they will be.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from waferbox.cirh.dialect.elements import element_from_proto
from waferbox.cirh.execution import initialisation
from wsc.v1 import initialisation_pb2, node_pb2

# Programs run beside the script's tracing and the compiler.
_THREADS = max(1, (os.cpu_count() or 1) // 2)
_LIMIT_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 3


class NotStagedError(RuntimeError):
    """Raised when a value is not staged here: the node that staged it was replaced, or the value was taken before."""


class Staging:
    """The staged values of a job. Thread-safe."""

    def __init__(self, *, has_room: bool = True) -> None:
        """has_room: whether values may be staged at all, as where states need not fit in memory they may not."""
        self._may_stage = has_room
        self._lock = threading.Lock()
        self._values: dict[str, torch.Tensor] = {}
        self._reserved_bytes = 0  # the bytes of values that are staged or being computed
        self._closed = False

    def make(self, states: Iterable[node_pb2.InitialState]) -> list[str]:
        """Computes and stages the values of states, as far as there is memory. Returns the names of the staged ones.

        Raises:
            CirhError: a program cannot be run.
        """
        chosen = [state for state in states if self._has_room(_result_bytes(state.program))]

        def make(state: node_pb2.InitialState) -> None:
            if self._closed:
                return
            result = state.program.buffers[state.program.result]
            value = _empty(result.elements, element_from_proto(result.element_type))
            initialisation.run(state.program, value)
            with self._lock:
                if not self._closed:
                    self._values[state.name] = value

        run_all(make, chosen)
        return [state.name for state in chosen]

    def take(self, name: str) -> torch.Tensor | None:
        """Removes and returns a staged value, flat; None if there is none."""
        with self._lock:
            return self._values.pop(name, None)

    def clear(self) -> None:
        """Drops all staged values."""
        with self._lock:
            self._values.clear()
            self._reserved_bytes = 0

    def close(self) -> None:
        """Drops all staged values, and stages no more."""
        with self._lock:
            self._closed = True
        self.clear()

    def _has_room(self, nbytes: int) -> bool:
        with self._lock:
            fits = self._may_stage and not self._closed and self._reserved_bytes + nbytes <= _LIMIT_BYTES
            self._reserved_bytes += nbytes if fits else 0
            return fits


def run_all(make: Callable[[node_pb2.InitialState], None], states: Iterable[node_pb2.InitialState]) -> None:
    """Calls `make` for each state, several at a time. Raises what a call has raised, after all have ended.

    States without a program come first: their values are staged, and free memory for the others when they are moved.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="initialisation") as pool:
        done = [pool.submit(make, state) for state in sorted(states, key=lambda state: state.HasField("program"))]
    for one in done:
        one.result()


def _empty(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor in pages of its own, which are freed with it; the allocator would keep them."""
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize), dtype=dtype)


def _result_bytes(program: initialisation_pb2.InitialProgram) -> int:
    if program.result >= len(program.buffers):
        return 0
    result = program.buffers[program.result]
    return int(result.elements) * element_from_proto(result.element_type).itemsize
