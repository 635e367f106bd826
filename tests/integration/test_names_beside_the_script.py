"""A user's own modules may be called as the folders of this project are: beside the script, and in PYTHONPATH."""

import textwrap
from pathlib import Path

import pytest
from cluster_rig import RunningCluster, StartScript

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

# Each raises when anything but the user's own code imports it.
MODULES = (
    "nodes", "wafer", "client", "utils", "queue_utils", "memoryx", "swarmx", "cirh", "lair", "links", "rpc", "runtime",
    "launch", "interconnect", "security", "settings", "roles", "states",
)  # fmt: skip
PACKAGES = ("appliance", "proto", "vendor_gateway", "tests")

SCRIPT = """
    import cerebras.pytorch as cstorch
    import torch
    from cerebras.pytorch.utils.data import DataLoader, DataExecutor

    def input_fn():
        import workers  # the user's own
        return workers.loader()

    backend = cstorch.backend("CSX")
    torch.manual_seed(0)
    with backend.device:
        model = torch.nn.Linear(4, 2)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)

    @cstorch.trace
    def step(inputs, targets):
        loss = torch.nn.functional.mse_loss(compiled(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @cstorch.step_closure
    def show(loss):
        print(f"loss {loss.item():.6f}")

    executor = DataExecutor(DataLoader(input_fn), num_steps=3)
    for inputs, targets in executor:
        show(step(inputs, targets))
"""

WORKERS = """
    import torch

    def loader():
        generator = torch.Generator().manual_seed(1)
        data = [(torch.randn(4, generator=generator), torch.randn(2, generator=generator)) for _ in range(24)]
        return torch.utils.data.DataLoader(data, batch_size=8)
"""


def _project(folder: Path) -> tuple[Path, Path]:
    """The script, and the folder of modules with names of ours."""
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(f'raise ImportError("the user\'s {name}.py was imported")\n')
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f'raise ImportError("the user\'s {name}/ was imported")\n')
    (folder / "workers.py").write_text(textwrap.dedent(WORKERS))
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return script, folder


@pytest.mark.parametrize("place", ["script's folder", "PYTHONPATH"])
@pytest.mark.parametrize("embedded", [True, False])
def test_a_script_trains_beside_modules_with_names_of_ours(
    start_script: StartScript, cluster: RunningCluster, tmp_path: Path, place: str, embedded: bool
) -> None:
    script, folder = _project(tmp_path / "project")
    variables = {}
    if place == "PYTHONPATH":
        script = script.rename(tmp_path / "train.py")
        variables["PYTHONPATH"] = str(folder)
    started = start_script(script, management=None if embedded else cluster.management, fresh=True, **variables)
    assert started.wait(120.0) == 0, started.errors
    losses = [float(line.split()[1]) for line in started.output.splitlines() if line.startswith("loss")]
    assert len(losses) == 3, started.output
