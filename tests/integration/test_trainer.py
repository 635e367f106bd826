"""A trainer as public ones are built: on a cluster the same as on the CPU, and resumed there."""

import os
from pathlib import Path

import pytest
from cluster_rig import RunningCluster, StartScript
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PROGRAM = Path(__file__).parents[1] / "shared" / "trainer_program" / "program.py"

BEHIND = ("recent_loss", "rate_behind", "labels")  # computed behind the step

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def scalars(folder: Path, name: str) -> dict[int, float]:
    accumulator = EventAccumulator(str(folder / "events")).Reload()
    return {event.step: event.value for event in accumulator.Scalars(name)}


def test_on_a_cluster_as_on_the_cpu(start_script: StartScript, cluster: RunningCluster, tmp_path: Path) -> None:
    inherited = os.environ.get("PYTHONPATH")
    imports = {"PYTHONPATH": os.pathsep.join([str(PROGRAM.parents[1]), *([inherited] if inherited else [])])}
    runs = {name: tmp_path / name for name in ("CPU", "CSX", "resumed")}
    started = [
        start_script(PROGRAM, device, runs[device], management=management, fresh=True, **imports)
        for device, management in (("CPU", None), ("CSX", cluster.management))
    ]
    assert [script.wait(200.0) for script in started] == [0, 0], [script.errors for script in started]
    arguments = ("CSX", runs["resumed"], "--load-from", runs["CSX"] / "checkpoint_6.mdl")
    resumed = start_script(PROGRAM, *arguments, management=cluster.management, fresh=True, **imports)
    assert resumed.wait(200.0) == 0, resumed.errors

    for name in ("loss", "gradient_norm", "rate_of_learning", "validate_0/loss", "validate_0/accuracy", *BEHIND):
        expected = scalars(runs["CPU"], name)
        for run in ("CSX", "resumed"):
            found = scalars(runs[run], name)
            of_run = {step: value for step, value in expected.items() if run == "CSX" or step > 6}
            if name != "recent_loss" or run == "CSX":  # which is not part of a checkpoint
                assert found == pytest.approx(of_run, rel=1e-5), (run, name)
    assert all(rate > 0 for rate in scalars(runs["CSX"], "rate").values())
    assert {path.name for path in runs["CSX"].glob("*.mdl")} == {f"checkpoint_{step}.mdl" for step in (0, 2, 4, 6, 8)}
