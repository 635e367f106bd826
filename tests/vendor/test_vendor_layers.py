"""Layers and functions of torch by the vendor's client: what it makes of each, run here on one wafer and on two.

The client traces and lowers each small model without a cluster; the plan of its text runs in one process, beside what
the client's own CPU backend gave. What the client itself cannot lower is no case of ours: the reason is printed.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "appliance"))  # for plan_simulator

from layer_steps import judge

# Not on sys.path: other modules of the scripts' folder are called as modules of other tests.
CASES = runpy.run_path(str(Path(__file__).parent / "scripts/layer_cases.py"))["CASES"]
PYTHON = os.environ.get("WAFERBOX_VENDOR_PYTHON", "")
SCRIPT = Path(__file__).parent / "scripts/trace_layers.py"
# What the text does not say with certainty.
REFUSED = {
    "avg_pool1d_padding": "count_include_pad",
    "avg_pool2d_padding": "count_include_pad",
    "avg_pool2d_no_count": "count_include_pad",
    "avg_pool3d_padding": "count_include_pad",
    "max_pool2d_dilation_stride": "leaves out the dilation",
    "interpolate_area": "adaptive pooling to more places",
    "input_uint8_mask": "convert it in the input_fn",
}
# What the client loses while it traces or lowers: its text is that of something else.
LOST = {
    "max_pool2d_dilation": "the dilation, where the result is as large without",
    "pixel_shuffle": "all of it: it writes zeros",
    "pixel_unshuffle": "the gradient",
}

pytestmark = [pytest.mark.parity, pytest.mark.timeout(3600)]


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client's program itself: the package's launcher imports the package first, which takes 5 s."""
    folder = tmp_path_factory.mktemp("bin")
    (program,) = Path(PYTHON).parents[1].glob("lib/python*/site-packages/cerebras/pytorch/lib/torch-cirh-opt")
    (folder / "torch-cirh-opt").symlink_to(program)
    return folder


@pytest.fixture(scope="session")
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, launcher: Path) -> Path:
    """The folder with what the client made of the cases that are tested."""
    tested = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in CASES if name in tested]
    folder = tmp_path_factory.mktemp("layers")
    path = f"{launcher}:{Path(PYTHON).parent}:{os.environ['PATH']}"
    subprocess.run(
        [PYTHON, SCRIPT, folder, *names], check=True, env={**os.environ, "PATH": path}, stdout=subprocess.DEVNULL
    )
    return folder


@pytest.mark.parametrize("wafers", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_that_of_the_cpu_backend(traced: Path, name: str, wafers: int) -> None:
    outcome = judge(traced / name, wafers)
    if outcome.kind == "untraced":
        pytest.skip(outcome.why)
    if name in LOST:
        assert outcome.kind == "wrong", f"the client has {LOST[name]} by now"
    elif name in REFUSED:
        assert outcome.kind == "refused"
        assert re.search(REFUSED[name], outcome.why)
    else:
        assert outcome.kind == "equal", outcome.why
