"""The script of the README, before and after: both run, and have the same losses."""

import re
from pathlib import Path

import pytest
from cluster_rig import RunningCluster, StartScript

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.cluster


def test_the_script_of_the_readme_before_and_after(
    start_script: StartScript, cluster: RunningCluster, tmp_path: Path
) -> None:
    (difference,) = re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)
    lines = difference.splitlines()
    assert {line[:1] for line in lines} == {" ", "+", "-"}
    scripts = []
    for name, mark in (("before", "-"), ("after", "+")):
        script = tmp_path / f"{name}.py"
        script.write_text("\n".join(line[1:] for line in lines if line[0] in (" ", mark)))
        scripts.append(start_script(script, management=cluster.management))
    losses = []
    for script in scripts:
        assert script.wait() == 0, script.errors
        losses.append([float(line) for line in script.output.split()])
    before, after = losses
    assert len(before) == 1797 // 64
    assert before[-1] < 0.5 * before[0]
    assert after == pytest.approx(before, rel=1e-5, abs=1e-6)  # six decimals are printed
