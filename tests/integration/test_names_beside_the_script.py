"""A user's own modules may be called as the folders of this project are: beside the script, and in PYTHONPATH.

Their folder may have a name that is no text.
"""

import os
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
        import swarmx, workers  # the user's own: one in PYTHONPATH, one beside the script
        return swarmx.loader(workers.samples())

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

    def samples():
        generator = torch.Generator().manual_seed(1)
        return [(torch.randn(4, generator=generator), torch.randn(2, generator=generator)) for _ in range(24)]
"""

SWARMX = """
    import torch

    def loader(data):
        return torch.utils.data.DataLoader(data, batch_size=8)
"""


def _write_modules(folder: Path, own: str, text: str, *, elsewhere: str) -> None:
    """Modules with names of ours: the user's own, which works, and all others but the one that works elsewhere."""
    folder.mkdir()
    for name in MODULES:
        if name != elsewhere:
            (folder / f"{name}.py").write_text(f'raise ImportError("the user\'s {name}.py was imported")\n')
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f'raise ImportError("the user\'s {name}/ was imported")\n')
    (folder / f"{own}.py").write_text(textwrap.dedent(text))


# Both places at once: whoever imports one of these modules from either fails.
@pytest.mark.parametrize("embedded", [True, False])
def test_a_script_trains_beside_modules_with_names_of_ours(
    start_script: StartScript, cluster: RunningCluster, tmp_path: Path, embedded: bool
) -> None:
    beside, library = tmp_path / os.fsdecode(b"project \xff"), tmp_path / "library"
    _write_modules(beside, "workers", WORKERS, elsewhere="swarmx")
    _write_modules(library, "swarmx", SWARMX, elsewhere="workers")
    script = beside / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    management = None if embedded else cluster.management
    started = start_script(script, management=management, fresh=True, PYTHONPATH=str(library))
    assert started.wait(120.0) == 0, started.errors
    losses = [float(line.split()[1]) for line in started.output.splitlines() if line.startswith("loss")]
    assert len(losses) == 3, started.output
