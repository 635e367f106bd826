"""Ctrl-C while a checkpoint is written: it comes once HDF5 has ended its call, and at once while a value is fetched."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cstorch
from cstorch._internal.checkpoint_files import temporary, writer
from cstorch._internal.interrupts import deferred, interruptible


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_in_a_write_is_neither_lost_nor_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HDF5 calls Python for each write, and makes an error of its own of what Python raises."""
    write = temporary.Output.write

    def write_interrupted(output: temporary.Output, data: Any) -> int:
        interrupt()
        return write(output, data)

    monkeypatch.setattr(temporary.Output, "write", write_interrupted)
    with pytest.raises(KeyboardInterrupt):
        cstorch.save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "x.mdl")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    cstorch.save({"a": torch.ones(3)}, tmp_path / "x.mdl")
    assert cstorch.load(tmp_path / "x.mdl")["a"].tolist() == [1, 1, 1]


def test_a_fetch_is_interrupted_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []

    def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        fetched.append(1)
        interrupt()
        fetched.append(2)
        yield tensor

    monkeypatch.setattr(writer, "_pieces", pieces)
    with pytest.raises(KeyboardInterrupt):
        cstorch.save({"a": torch.ones(3)}, tmp_path / "x.mdl")
    assert fetched == [1]
    assert not list(tmp_path.iterdir())


def test_the_handler_of_the_script_gets_what_was_deferred() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        with deferred():
            interrupt()
            with deferred():
                interrupt()
            assert not called
            assert list(interruptible([1, 2])) == [1, 2]
            assert called == [signal.SIGINT]
        assert called == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with deferred():
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_defers_nothing() -> None:
    handlers: list[Any] = []

    def save() -> None:
        with deferred():
            handlers.append(signal.getsignal(signal.SIGINT))
            assert list(interruptible([1])) == [1]

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
