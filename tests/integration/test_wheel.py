"""The wheel, in an environment that has nothing else of ours, runs the README's script outside of the checkout,
and makes what Kubernetes needs."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from cluster_rig import StartScript

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, and with the libraries of this one."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    workflow = {"GITHUB_SERVER_URL": "https://github.example", "GITHUB_REPOSITORY": "someone/waferbox"}
    subprocess.run(
        [*command, "--wheel-dir", str(tmp_path / "wheels"), str(ROOT)],
        check=True,
        timeout=120,
        env={**os.environ, **workflow},
    )
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    # As a plain folder of the path: its own .pth files, which lead to the checkout, are not read.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def test_the_wheel_runs_the_script_of_the_readme(installed: Path, start_script: StartScript, tmp_path: Path) -> None:
    (difference,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text("\n".join(line[1:] for line in difference.splitlines() if line[0] in " +"))
    check = "import cstorch, waferbox, memoryx; print(cstorch.__file__, waferbox.__file__, memoryx.__file__)"
    found = subprocess.run(
        [installed, "-c", check], check=True, timeout=60, text=True, cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert str(ROOT) not in found.stdout
    started = start_script(script, management=None, fresh=True, python=str(installed))
    assert started.wait(150.0) == 0, started.errors
    losses = [float(line) for line in started.output.split()]
    assert losses[-1] < 0.5 * losses[0]


def test_a_wheel_of_a_workflow_names_its_repository(installed: Path) -> None:
    code = (
        "import importlib.metadata; print(*importlib.metadata.metadata('waferbox').get_all('Project-URL'), sep='\\n')"
    )
    found = subprocess.run([installed, "-c", code], check=True, timeout=60, text=True, stdout=subprocess.PIPE)
    source = "https://github.example/someone/waferbox"
    assert found.stdout.splitlines() == [
        f"Source, {source}",
        f"Issues, {source}/issues",
        f"Changelog, {source}/blob/main/CHANGELOG.md",
    ]


def test_the_wheel_has_all_that_manifests_and_charts_need(installed: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_MEMORY")}
    for arguments in ([], ["--chart", "waferbox"]):
        command: list[str | Path] = [installed, "-m", "waferbox", "kubernetes", *arguments]
        done = subprocess.run(
            command, check=True, timeout=60, text=True, cwd=tmp_path, env=environment, stdout=subprocess.PIPE
        )
        if not arguments:
            assert done.stdout == (ROOT / "deploy" / "kubernetes" / "waferbox.yaml").read_text()
    made, kept = (
        {path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "waferbox", ROOT / "deploy" / "helm" / "waferbox")
    )
    assert made == kept
