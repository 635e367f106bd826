"""What a user sees of an execution, in the order of the real system."""

import itertools
import logging
import re
import threading
from functools import partial
from pathlib import Path

import pytest
from fake_cluster import FakeCluster
from halved_weight import Setup

import cstorch
from cstorch._internal import log
from cstorch._internal.session.execution import cluster_execution
from cstorch.utils.progress import Progress
from waferbox.host.slow_work import reported

LINES = [
    "The model is on the device: Linear, 3 parameters",
    r"Execution 1 \(executors/000003\), train: step \(.*halved_weight.py:\d+\) of Linear, 2 steps of 4 rows from .*",
    r"Compiled in \S+ s, for job-1 on 1 CSX",
    r"\| Eval Device=CSX, Step=1, Loss=1.00000, Rate=.* samples/sec, GlobalRate=.* samples/sec",
    r"\| Eval Device=CSX, Step=2, Loss=2.00000, Rate=.* samples/sec, GlobalRate=.* samples/sec",
    "Training of 2 steps completed successfully!",
]


def test_the_lines_and_their_order(
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "cstorch")
    monkeypatch.setattr(cluster_execution, "_numbers", itertools.count(1))
    setup = Setup(cluster, tmp_path)
    (setup.backend.artifact_dir / "executors" / "000002").mkdir(parents=True)  # of an earlier run
    setup.model.eval()
    executor = setup.executor(2)
    progress = Progress("Eval", executor)
    report = cstorch.step_closure(lambda loss: progress.step(loss=float(loss)))
    for batch in executor:
        report(setup.step(batch))
    assert len(caplog.messages) == len(LINES)
    for message, line in zip(caplog.messages, LINES, strict=True):
        assert re.fullmatch(line, message)


def test_what_takes_long_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cstorch")
    with log.logged_if_slow("Nothing"):
        pass
    assert not caplog.messages
    shown = threading.Event()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: shown.set())
    monkeypatch.setattr(log, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(log, "reported", partial(reported, intervals=(0.01, 60.0)))
    log.logger.addHandler(handler)
    try:
        with log.logged_if_slow("Tracing"):
            assert shown.wait(20)
    finally:
        log.logger.removeHandler(handler)
    assert caplog.messages[0] == "Tracing ..."
    assert re.fullmatch(r"Tracing took \d+\.\d s", caplog.messages[1])
