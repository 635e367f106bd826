"""The script of the README, before and after: both run, and have the same losses."""

import re
import runpy
from pathlib import Path

import pytest
from cluster_rig import RunningCluster, StartScript

README = Path(__file__).parents[2] / "README.md"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]  # a cold compile, on a busy machine


def test_the_script_of_the_readme_before_and_after(
    start_script: StartScript, cluster: RunningCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (difference,) = re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)
    lines = difference.splitlines()
    assert {line[:1] for line in lines} == {" ", "+", "-"}
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    for script, mark in ((before, "-"), (after, "+")):
        script.write_text("\n".join(line[1:] for line in lines if line[0] in (" ", mark)))
    started = start_script(after, management=cluster.management, fresh=True)
    runpy.run_path(str(before))
    plain = [float(line) for line in capsys.readouterr().out.split()]
    assert len(plain) == 1797 // 64
    assert plain[-1] < 0.5 * plain[0]
    assert started.wait() == 0, started.errors
    assert [float(line) for line in started.output.split()] == pytest.approx(plain, rel=1e-5, abs=1e-6)  # six decimals
