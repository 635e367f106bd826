"""What a user sees of an execution, in the order of the real system."""

import logging
import re
from pathlib import Path

import pytest
from fake_cluster import FakeCluster
from halved_weight import Setup

import cstorch
from cstorch.utils.progress import Progress

LINES = [
    "The model is on the device: Linear, 3 parameters",
    r"Execution 1, eval: step \(.*halved_weight.py:\d+\) of Linear, 2 steps of 4 rows from input_fn .*",
    "Compiling the model. This may take a few minutes.",
    "No image is built: .*",
    "Compile job id: job-1.*",
    "The coordinator of the job is ready",
    "Compile artifact 0: compiled in .*",
    "Compile was successful!",
    "Programming the cluster for execution. This may take a few minutes.",
    "Execute job id: job-1",
    "Preparing to execute using 1 CSX",
    "Sending initial weights to the weight servers",
    "Sent 2 of 2 state tensors to the cluster",
    "Staging the run: .*",
    "Beginning the run",
    r"\| Eval Device=CSX, Step=1, Loss=1.00000, Rate=.* samples/sec, GlobalRate=.* samples/sec",
    r"\| Eval Device=CSX, Step=2, Loss=2.00000, Rate=.* samples/sec, GlobalRate=.* samples/sec",
    "Evaluation of 2 steps completed successfully!",
]


def test_the_lines_and_their_order(
    cluster: FakeCluster,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "cstorch")
    setup = Setup(cluster, tmp_path)
    setup.model.eval()
    executor = setup.executor(2)
    progress = Progress("Eval", executor)
    report = cstorch.step_closure(lambda loss: progress.step(loss=float(loss)))
    for batch in executor:
        report(setup.step(batch))
    assert len(caplog.messages) == len(LINES)
    for message, line in zip(caplog.messages, LINES, strict=True):
        assert re.fullmatch(line, message)
