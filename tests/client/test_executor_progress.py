"""The progress lines."""

import io
import logging
import sys
from pathlib import Path

import pytest
import torch

import cstorch
from cstorch.utils.data import DataExecutor, DataLoader
from cstorch.utils.progress import Progress


@pytest.fixture(autouse=True)
def _cpu_backend(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)


def loop() -> None:
    executor = DataExecutor(DataLoader(lambda: [torch.zeros(4, 2)]), num_steps=5)
    with Progress("Train", executor, every=2) as progress:
        for _ in executor:
            progress.step(loss=2.30259)


def test_lines_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cstorch.progress"):
        loop()
    lines = [record.getMessage() for record in caplog.records if record.name == "cstorch.progress"]
    steps = [line.partition("Step=")[2].partition(",")[0] for line in lines]
    assert steps == ["2", "4", "5"]
    assert lines[0].startswith("| Train Device=CPU, Step=2, Loss=2.30259, Rate=")
    assert lines[0].count(" samples/sec") == 2
    assert "GlobalRate=" in lines[0]


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    loop()
    assert "5/5" in terminal.getvalue()
    assert "Loss=2.30259" in terminal.getvalue()
    assert not [record for record in caplog.records if record.name == "cstorch.progress"]
