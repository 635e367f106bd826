"""The examples of the older generations: the same losses on a cluster and on the CPU."""

import re
from pathlib import Path
from typing import Any

import pytest
from cluster_rig import SCRIPTS, RunningCluster, StartScript

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 30

pytestmark = pytest.mark.cluster


def run(start_script: StartScript, cluster: RunningCluster, script: str | Path, *arguments: Any) -> str:
    started = start_script(EXAMPLES / script, *arguments, management=cluster.management)
    assert started.wait() == 0, started.errors
    return started.output


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"^Loss: +(\S+)$", output, re.MULTILINE)]


def test_release_1_8_trains_and_evaluates(start_script: StartScript, cluster: RunningCluster, tmp_path: Path) -> None:
    data = ["--data", tmp_path / "digits.pt"]
    trained: dict[str, list[float]] = {}
    evaluated: dict[str, list[float]] = {}
    for backend in ("cpu", "wse_ws"):
        common = [*data, "--backend", backend, "--model-dir", tmp_path / backend]
        more = ["--num-steps", STEPS, "--checkpoint-steps", 10]
        trained[backend] = losses(run(start_script, cluster, "experimental_digits/train.py", *common, *more))
        assert sorted(path.name for path in (tmp_path / backend).glob("*.mdl")) == [
            f"checkpoint_{step}.mdl" for step in (0, 10, 20)
        ]
        checkpoint = ["--checkpoint-path", tmp_path / backend / "checkpoint_20.mdl"]
        output = run(start_script, cluster, "experimental_digits/eval.py", *common, *checkpoint)
        accuracy = re.search(r"^Eval Accuracy: (\S+)$", output, re.MULTILINE)
        assert accuracy is not None
        evaluated[backend] = [*losses(output), float(accuracy[1])]
    assert len(trained["cpu"]) == STEPS
    assert trained["cpu"][-1] < 0.8 * trained["cpu"][0]
    assert trained["wse_ws"] == pytest.approx(trained["cpu"], rel=1e-5)
    assert len(evaluated["cpu"]) == 6
    assert evaluated["wse_ws"] == pytest.approx(evaluated["cpu"], rel=1e-5)


def test_release_1_8_goes_on_from_a_checkpoint(
    start_script: StartScript, cluster: RunningCluster, tmp_path: Path
) -> None:
    common = ["--data", tmp_path / "digits.pt", "--checkpoint-steps", 10]
    script = "experimental_digits/train.py"
    before = losses(run(start_script, cluster, script, *common, "--model-dir", tmp_path, "--num-steps", 31))
    more = [*common, "--checkpoint-path", tmp_path / "checkpoint_30.mdl", "--num-steps", 3]
    resumed = {
        backend: losses(
            run(start_script, cluster, script, *more, "--backend", backend, "--model-dir", tmp_path / backend)
        )
        for backend in ("cpu", "wse_ws")
    }
    assert resumed["wse_ws"] == pytest.approx(resumed["cpu"], rel=1e-5)
    assert max(resumed["cpu"]) < 0.8 * before[0]
    assert (tmp_path / "wse_ws" / "checkpoint_30.mdl").exists()  # the first step is number 30 again


def test_release_1_2_runs_a_plain_loop(start_script: StartScript, cluster: RunningCluster, tmp_path: Path) -> None:
    on_cpu = losses(run(start_script, cluster, "session_digits/train.py", "--model-dir", tmp_path / "cpu"))
    arguments = ["--model-dir", tmp_path / "csx", "--cs-ip", cluster.management]
    on_cluster = losses(run(start_script, cluster, "session_digits/train.py", *arguments))
    assert len(on_cpu) == 3 * (1797 // 128)
    assert on_cpu[-1] < 0.2 * on_cpu[0]
    assert on_cluster == pytest.approx(on_cpu, rel=1e-5)
    assert (tmp_path / "csx" / f"model_{len(on_cpu)}.pt").exists()


def test_release_2_0_trains_and_evaluates(start_script: StartScript, cluster: RunningCluster) -> None:
    values: dict[str, list[float]] = {}
    for backend in ("CPU", "CSX"):
        output = run(start_script, cluster, SCRIPTS / "release_2_0.py", backend)
        found = re.findall(r"^(loss|mean): (\S+) (\d+)$", output, re.MULTILINE)
        assert [(name, int(step)) for name, _, step in found] == [
            (name, step) for name in ("loss", "mean") for step in range(1, 7)
        ]
        values[backend] = [float(value) for _, value, _ in found]
    assert values["CSX"] == pytest.approx(values["CPU"], rel=1e-5)
