"""The Helm chart, rendered by Helm itself: it makes what `waferbox kubernetes` prints, for all values."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from waferbox.commands.cli import app

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "waferbox"
SCHEMAS = "1.37"
# Each value that adds lines to the manifests, with the option for it.
ADDITIONS = {
    ("tls=true",): ("--tls",),
    ("storage.class=fast",): ("--storage-class", "fast"),
    ("data.claim=digits", "data.folder=/digits"): ("--data", "digits:/digits"),
}
EVERYTHING = [
    *("--images", "registry.example:5000/team/", "--tag", "2", "--tls", "--storage", "5Gi", "--storage-class", "fast"),
    *("--data", "1:/data", "--scale", "wafer=4", "--scale", "memoryx=3", "--scale", "swarmx=0", "--scale", "worker=8"),
]
Manifests = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(autouse=True)
def nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MEMORYX", "SWARMX", "WAFER", "WORKER", "MANAGEMENT", "INGRESS"):
        monkeypatch.delenv(f"{name}_MEMORY", raising=False)
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"HELM_{name}_HOME", str(tmp_path / "helm"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def helm() -> str:
    """The program; `make test` installs it."""
    found = shutil.which("helm", path=f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("helm is not installed: run `make .venv/bin/helm`")
    return found


def command(*options: str) -> str:
    done = CliRunner().invoke(app, ["kubernetes", *options])
    assert done.exit_code == 0, done.output
    return done.output


def run(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *arguments], capture_output=True, text=True, timeout=60)


def by_name(text: str) -> Manifests:
    made = [each for each in yaml.safe_load_all(text) if each]
    found = {(each["kind"], each["metadata"]["name"]): each for each in made}
    assert len(found) == len(made)
    return found


def render(helm: str, values: Iterable[str] = (), chart: Path = CHART, namespace: str = "waferbox") -> Manifests:
    settings = [word for value in values for word in ("--set", value)]
    done = run(helm, "template", "release", str(chart), "--namespace", namespace, *settings)
    assert done.returncode == 0, done.stderr
    return by_name(done.stdout)


def expected(*options: str) -> Manifests:
    """What the command prints, without the namespace, which Helm makes."""
    made = by_name(command(*options))
    return {key: each for key, each in made.items() if key[0] != "Namespace"}


def test_the_files_in_the_repository_are_what_the_command_writes(tmp_path: Path) -> None:
    command("--chart", str(tmp_path / "waferbox"))
    made, kept = (
        {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "waferbox", CHART)
    )
    assert made == kept, "stale: run `waferbox kubernetes --chart deploy/helm/waferbox`"


def test_by_default_it_is_what_the_command_prints_and_a_secret(helm: str) -> None:
    import kubernetes_validate

    rendered = render(helm)
    secret = rendered.pop(("Secret", "waferbox-secret"))
    kubernetes_validate.validate(secret, SCHEMAS, strict=True)
    assert len(base64.b64decode(secret["data"]["cluster.key"])) == 32
    assert secret["metadata"]["annotations"] == {"helm.sh/hook": "pre-install,pre-upgrade"}
    assert rendered == expected()


@pytest.mark.parametrize(
    "chosen",
    [each for size in (1, 2, 3) for each in itertools.combinations(ADDITIONS, size)],
    ids=lambda chosen: "+".join(values[0] for values in chosen),
)
def test_each_addition_is_that_of_its_option(helm: str, chosen: Sequence[tuple[str, ...]]) -> None:
    options = itertools.chain.from_iterable(ADDITIONS[values] for values in chosen)
    values = itertools.chain.from_iterable(chosen)
    assert render(helm, ["createSecret=false", *values]) == expected(*options)


def test_numbers_sizes_and_images_are_values(helm: str) -> None:
    values = ["wafers=3", "workers=8", "memoryx=5", "images=registry.example/team/", "tag=v2", "storage.size=5Gi"]
    options = ["--images", "registry.example/team/", "--tag", "v2", "--storage", "5Gi", "--namespace", "7"]
    counts = ["--scale", "wafer=3", "--scale", "worker=8", "--scale", "memoryx=5"]
    assert render(helm, ["createSecret=false", *values], namespace="7") == expected(*options, *counts)
    (container,) = render(helm, ["memory.wafer=96Gi"])["StatefulSet", "wafer"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"memory": "96Gi"}, "limits": {"memory": "96Gi"}}


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (["wafers=4"], ["wafer=4"]),
        (["wafers=4", "memoryx=1", "swarmx=0"], ["wafer=4", "memoryx=1", "swarmx=0"]),
        (["wafers=0"], ["wafer=0"]),
    ],
)
def test_each_wafer_has_a_shard_a_node_and_a_worker_beside_it_unless_numbers_are_given(
    helm: str, values: Sequence[str], options: Sequence[str]
) -> None:
    scale = itertools.chain.from_iterable(("--scale", option) for option in options)
    assert render(helm, ["createSecret=false", *values]) == expected(*scale)


def test_options_are_the_defaults_of_the_values(helm: str, tmp_path: Path) -> None:
    chart = tmp_path / "waferbox"
    command("--chart", str(chart), *EVERYTHING)
    assert render(helm, ["createSecret=false"], chart) == expected(*EVERYTHING)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wafer=4", "additional properties 'wafer' not allowed"),
        ("wafers=-1", "minimum"),
        ("wafers=many", "got string, want integer"),
        ("memoryx=many", "got string, want null or integer"),
        ("memory.wafer=8G", "does not match pattern"),
        ("memory.wafers=8Gi", "additional properties 'wafers' not allowed"),
        ("images=registry.example/team", "does not match pattern"),
        ("data.folder=data", "does not match pattern"),
        ("tls=yes", "got string, want boolean"),
        ("storage.class=a: b", "does not match pattern"),
    ],
)
def test_values_that_are_wrong_are_refused(helm: str, value: str, message: str) -> None:
    done = run(helm, "template", str(CHART), "--set", value)
    assert done.returncode != 0
    assert message in done.stderr


def test_helm_finds_nothing_to_criticise(helm: str) -> None:
    done = run(helm, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


def test_the_notes_name_the_cluster(helm: str) -> None:
    done = run(helm, "install", "release", str(CHART), "--dry-run=client", "--namespace", "team", "--set", "wafers=4")
    assert done.returncode == 0, done.stderr
    _, notes = done.stdout.split("NOTES:")
    assert "4 wafer(s)" in notes
    assert "WAFERBOX_MANAGEMENT=ingress.team:7000" in notes
    assert "http://127.0.0.1:7001" in notes


def test_every_value_has_a_meaning_and_a_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() == schema["properties"].keys()
    lines = (CHART / "values.yaml").read_text().splitlines()
    assert all("#" in line for line in lines if not line.endswith(":"))


def test_a_chart_of_ray_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["kubernetes", "--ray", "--chart", str(tmp_path / "chart")])
    assert done.exit_code == 2
    assert "there is no chart of a cluster on Ray" in done.output


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["kubernetes", "--chart", str(tmp_path / "file" / "chart")])
    assert done.exit_code == 1
    assert "the chart cannot be written" in done.output
