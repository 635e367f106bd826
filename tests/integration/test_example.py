"""The main job: examples/fc_digits/train.py on two wafers; its checkpoints; training that goes on from one."""

import re
from pathlib import Path

import pytest
import resumption
import torch
from cluster_rig import RunningCluster, StartScript

import cerebras.pytorch as cstorch

TRAIN = Path(__file__).parents[2] / "examples" / "fc_digits" / "train.py"
LINE = re.compile(
    r"\| (?P<mode>Train|Eval) Device=CSX, Step=(?P<step>\d+), Loss=\d+\.\d{5}, "
    r"Rate=\d+\.\d\d samples/sec, GlobalRate=\d+\.\d\d samples/sec"
)

pytestmark = pytest.mark.cluster


@pytest.fixture
def on_cluster(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a script on the cluster."""
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)


def test_the_example_learns_the_digits_and_leaves_checkpoints(
    start_script: StartScript, cluster: RunningCluster, tmp_path: Path
) -> None:
    script = start_script(TRAIN, "--model-dir", tmp_path, management=cluster.management, fresh=True)
    assert script.wait() == 0, script.errors
    lines = [(found["mode"], int(found["step"])) for found in LINE.finditer(script.errors)]
    assert lines == [("Train", step) for step in range(50, 401, 50)] + [("Eval", step) for step in range(1, 6)]
    accuracy = re.search(r"Accuracy on held-out digits: ([\d.]+)", script.errors)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.95

    plain = cstorch.load(tmp_path / "checkpoint_400.mdl", map_location="cpu")
    torch.save(plain, tmp_path / "plain.pt")
    read = torch.load(tmp_path / "plain.pt", weights_only=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
    )
    names = {"fc1": "0", "fc2": "2", "fc3": "4"}
    model.load_state_dict({f"{names[name[:3]]}{name[3:]}": value for name, value in read["model"].items()})
    images, labels = resumption.held_out_digits()
    assert (model(images).argmax(-1) == labels).float().mean().item() == pytest.approx(float(accuracy[1]), abs=1e-4)

    more = ["--model-dir", tmp_path / "more", "--load", tmp_path / "checkpoint_400.mdl", "--num-steps", 10]
    script = start_script(TRAIN, *more, "--num-csx", 1, management=cluster.management)
    assert script.wait() == 0, script.errors
    (first,) = re.findall(r"Train .*Step=10, Loss=([\d.]+)", script.errors)
    assert float(first) < 0.2  # far below ln 10, where training begins


def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(on_cluster: None, tmp_path: Path) -> None:
    whole = resumption.train(tmp_path / "whole", num_steps=40, checkpoint_steps=20)
    cstorch.close_backend()
    resumed = resumption.train(tmp_path / "rest", num_steps=20, load=tmp_path / "whole" / "checkpoint_20.mdl")
    assert resumed.keys() == whole.keys()
    for name, weight in whole.items():
        assert (resumed[name] - weight).abs().max() <= 1e-6 * weight.abs().max(), name


def test_a_checkpoint_of_another_model_is_explained(
    start_script: StartScript, cluster: RunningCluster, tmp_path: Path
) -> None:
    """Files that are no checkpoint: tests/client/test_storage.py."""
    path = tmp_path / "checkpoint.mdl"
    cstorch.save({"model": {"fc1.weight": torch.randn(256, 32)}, "optimizer": {}, "scheduler": {}}, path)
    script = start_script(TRAIN, "--model-dir", tmp_path, "--load", path, management=cluster.management)
    assert script.wait() == 1
    message = script.errors[script.errors.rindex("RuntimeError: ") :]
    assert re.search(r"size mismatch for fc1.weight.*\[256, 32\]", message, re.DOTALL), message
    assert script.errors.count("Traceback") == 1, script.errors
