"""The examples of all generations: the same losses on a cluster and on the CPU."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster_rig import SCRIPTS, RunningCluster, StartScript
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]  # a test runs up to three pairs of scripts

Arguments = Sequence[object]


@pytest.fixture
def management(cluster: RunningCluster) -> str:
    return cluster.management


def run(
    start_script: StartScript,
    script: Path,
    on_cpu: Arguments,
    on_cluster: Arguments,
    management: str | None = None,
    *,
    fresh: bool = True,
) -> list[str]:
    """What the script prints on the CPU and on the cluster; both run at once.

    fresh: that on the cluster is as a user starts it.
    """
    started = [
        start_script(script, *on_cpu, management=None),
        start_script(script, *on_cluster, management=management, fresh=fresh),
    ]
    for running in started:
        assert running.wait(150.0) == 0, running.errors  # of a busy machine
    return [running.output for running in started]


def numbers(output: str, name: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{name}: +(\S+)$", output, re.MULTILINE)]


def test_release_1_8(start_script: StartScript, management: str, tmp_path: Path) -> None:
    data = ["--data", tmp_path / "digits.pt"]
    backends = {"cpu": [*data, "--backend", "cpu"], "wse_ws": [*data, "--mgmt-address", management]}
    folder = EXAMPLES / "experimental_digits"

    def both(script: str, model_dir: str, *arguments: object, load: str = "") -> list[str]:
        lines = []
        for name, settings in backends.items():
            checkpoint = ["--checkpoint-path", tmp_path / name / load] if load else []
            lines.append([*settings, "--model-dir", tmp_path / name / model_dir, *checkpoint, *arguments])
        on_cpu, on_cluster = lines
        return run(start_script, folder / script, on_cpu, on_cluster, fresh=not load)

    steps = ["--checkpoint-steps", 10, "--num-steps", 30]
    cpu, cluster = (numbers(output, "Loss") for output in both("train.py", "", *steps))
    assert len(cpu) == 30
    assert cpu[-1] < 0.8 * cpu[0]
    assert cluster == pytest.approx(cpu, rel=1e-5)
    for name in backends:
        saved = sorted(path.name for path in (tmp_path / name).glob("*.mdl"))
        assert saved == [f"checkpoint_{step}.mdl" for step in (0, 10, 20)]

    evaluated = both("eval.py", "eval", load="checkpoint_20.mdl")
    for name in ("Loss", "Eval Accuracy"):
        (cpu_value,), (cluster_value,) = (numbers(output, name) for output in evaluated)
        assert cluster_value == pytest.approx(cpu_value, rel=1e-5)

    resumed = both("train.py", "more", "--checkpoint-steps", 2, "--num-steps", 3, load="checkpoint_20.mdl")
    cpu_more, cluster_more = (numbers(output, "Loss") for output in resumed)
    assert max(cpu_more) < 0.8 * cpu[0]
    assert cluster_more == pytest.approx(cpu_more, rel=1e-5)
    assert (tmp_path / "wse_ws" / "more" / "checkpoint_22.mdl").exists()


def test_release_1_2(start_script: StartScript, management: str, tmp_path: Path) -> None:
    folders = {name: ["--model-dir", tmp_path / name] for name in ("cpu", "cluster")}
    outputs = run(
        start_script,
        EXAMPLES / "session_digits" / "train.py",
        folders["cpu"],
        [*folders["cluster"], "--cs-ip", management],
    )
    cpu, cluster = (numbers(output, "Loss") for output in outputs)
    assert len(cpu) == 3 * (1797 // 128)
    assert cpu[-1] < 0.2 * cpu[0]
    assert cluster == pytest.approx(cpu, rel=1e-5)
    assert (tmp_path / "cluster" / f"model_{len(cpu)}.pt").exists()


def test_release_2_0(start_script: StartScript, management: str) -> None:
    values = []
    for output in run(start_script, SCRIPTS / "release_2_0.py", ["CPU"], ["CSX"], management):
        found = re.findall(r"^(loss|mean): (\S+) (\d+)$", output, re.MULTILINE)
        assert [(name, int(step)) for name, _, step in found] == [
            (name, step) for name in ("loss", "mean") for step in range(1, 7)
        ]
        values.append([float(value) for _, value, _ in found])
    assert values[1] == pytest.approx(values[0], rel=1e-5)


def test_release_2_2_and_its_summaries_in_tensorboard(
    start_script: StartScript, management: str, tmp_path: Path
) -> None:
    """Trains, evaluates, and goes on from a checkpoint; all figures are read as TensorBoard reads them."""

    def both(run_name: str, *arguments: object) -> list[dict[str, list[tuple[int, float]]]]:
        lines = []
        for backend in ("CPU", "CSX"):
            folder = tmp_path / backend / run_name
            own = ["--backend", backend, "--model-dir", folder, "--summaries", folder / "summaries"]
            lines.append([*own, "--data", tmp_path / "digits.pt", "--checkpoint-steps", 10, *arguments])
        fresh = "--load" not in arguments
        on_cpu, on_cluster = lines
        run(start_script, EXAMPLES / "fc_digits" / "train.py", on_cpu, on_cluster, management, fresh=fresh)
        return [scalars(tmp_path / backend / run_name / "summaries") for backend in ("CPU", "CSX")]

    for arguments in (["--num-steps", 20], ["--num-steps", 5, "--load", tmp_path / "CSX" / "20" / "checkpoint_20.mdl"]):
        steps = int(str(arguments[1]))
        cpu, cluster = both(str(steps), *arguments)
        assert cpu.keys() == cluster.keys() == {"loss/train", "loss/eval", "accuracy/eval"}
        assert [step for step, _ in cpu["loss/train"]] == list(range(1, steps + 1))
        assert [step for step, _ in cpu["loss/eval"]] == [1, 2, 3, 4, 5]
        for name, events in cpu.items():
            assert [step for step, _ in cluster[name]] == [step for step, _ in events]
            assert [value for _, value in cluster[name]] == pytest.approx([value for _, value in events], rel=1e-5)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }
