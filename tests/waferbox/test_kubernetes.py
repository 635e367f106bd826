"""The manifests for Kubernetes: valid, confined, and what docker-compose.yml says of the roles."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from waferbox.commands.cli import app
from waferbox.kubernetes.compose_file import ComposeFileError, read_roles

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
RENDERED = ROOT / "deploy" / "kubernetes" / "waferbox.yaml"
SCHEMAS = "1.37"
EVERYTHING = [
    *("--namespace", "team", "--images", "registry.example/team/", "--tag", "2", "--tls", "--storage", "5Gi"),
    *("--storage-class", "fast", "--data", "digits:/data", "--scale", "wafer=4", "--scale", "worker=8"),
]


@pytest.fixture(autouse=True)
def nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMORYX", "SWARMX", "WAFER", "WORKER", "MANAGEMENT", "INGRESS"):
        monkeypatch.delenv(f"{name}_MEMORY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@cache
def rendered(*options: str) -> str:
    done = CliRunner().invoke(app, ["kubernetes", str(COMPOSE), *options])
    assert done.exit_code == 0, done.output
    return done.output


@cache
def manifests(*options: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(rendered(*options)))


def workloads(*options: str) -> dict[str, dict[str, Any]]:
    return {_name(each): each["spec"] for each in manifests(*options) if "template" in each.get("spec", {})}


def pods(*options: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, workload in workloads(*options).items():
        yield name, workload["template"]["spec"]


def _name(manifest: Mapping[str, Any]) -> str:
    return str(manifest["metadata"]["name"])


@pytest.mark.parametrize("options", [[], EVERYTHING], ids=["plain", "everything"])
def test_they_are_valid(options: list[str]) -> None:
    import kubernetes_validate

    made = manifests(*options)
    assert len(made) > 20
    for manifest in made:
        kubernetes_validate.validate(manifest, SCHEMAS, strict=True)
    names = [(manifest["kind"], _name(manifest)) for manifest in made]
    assert len(set(names)) == len(names)
    assert {manifest["metadata"].get("namespace") for manifest in made[1:]} == {"team" if options else "waferbox"}


def test_the_schemas_refuse_what_is_wrong() -> None:
    import kubernetes_validate

    (broken,) = (each for each in manifests() if each["kind"] == "StatefulSet" and _name(each) == "wafer")
    broken = deepcopy(broken)
    broken["spec"]["template"]["spec"]["containers"][0]["imagee"] = "waferbox"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, SCHEMAS, strict=True)


def test_the_file_in_the_repository_is_what_the_command_prints() -> None:
    assert RENDERED.read_text() == rendered(), "stale: run `waferbox kubernetes > deploy/kubernetes/waferbox.yaml`"


def test_each_role_is_run_as_by_compose() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    roles = {name: service for name, service in services.items() if "profiles" not in service}
    found = workloads()
    assert found.keys() == roles.keys()
    for name, service in roles.items():
        pod, is_named = found[name]["template"]["spec"], name in ("management", "ingress")
        (container,) = pod["containers"]
        at = "0.0.0.0:7000" if is_named else "$(POD_IP):7000"
        assert container["args"] == [at if word == "0.0.0.0:7000" else word for word in service["command"]]
        assert container["image"] == f"{service['image']}:latest"
        assert found[name]["replicas"] == service.get("scale", 1)
        assert pod.get("hostname") == (name if is_named else None)


@pytest.mark.parametrize("options", [[], EVERYTHING], ids=["plain", "everything"])
def test_all_containers_are_confined(options: list[str]) -> None:
    for _, pod in pods(*options):
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in (*pod["initContainers"], *pod["containers"]):
            allowed = container["securityContext"]
            assert allowed["readOnlyRootFilesystem"]
            assert not allowed["allowPrivilegeEscalation"]
            assert allowed["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("options", [[], EVERYTHING], ids=["plain", "everything"])
def test_every_mount_has_its_volume_and_every_role_what_it_keeps(options: list[str]) -> None:
    for name, workload in workloads(*options).items():
        pod, claims = workload["template"]["spec"], workload.get("volumeClaimTemplates", [])
        volumes = {volume["name"] for volume in pod["volumes"]} | {_name(claim) for claim in claims}
        mounts = [m["name"] for c in (*pod["initContainers"], *pod["containers"]) for m in c["volumeMounts"]]
        assert set(mounts) == volumes
        assert bool(claims) == (name in ("memoryx", "wafer"))
    claimed = {_name(each) for each in manifests(*options) if each["kind"] == "PersistentVolumeClaim"}
    assert claimed == {"management-cache", "ingress-cache"}


@pytest.mark.parametrize("options", [[], EVERYTHING], ids=["plain", "everything"])
def test_probes_and_secrets_are_those_of_tls_where_it_is_wanted(options: list[str]) -> None:
    for _, pod in pods(*options):
        (container,) = pod["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert ("exec" if options else "grpc") in container[probe]
        secrets = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        assert secrets == ({"waferbox-secret", "waferbox-tls"} if options else {"waferbox-secret"})
    assert "Secret" not in {manifest["kind"] for manifest in manifests(*options)}


def test_options_say_how_many_and_where() -> None:
    found = workloads(*EVERYTHING)
    assert (found["wafer"]["replicas"], found["worker"]["replicas"]) == (4, 8)
    containers = {name: workload["template"]["spec"]["containers"][0] for name, workload in found.items()}
    assert containers["memoryx"]["image"] == "registry.example/team/waferbox-memoryx:2"
    data = {"name": "data", "mountPath": "/data", "readOnly": True}
    assert [name for name, container in containers.items() if data in container["volumeMounts"]] == ["worker"]
    (claim,) = found["memoryx"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scale", "wafers=2"], "the roles are ingress, management"),
        (["--scale", "wafer=many"], "must look like ROLE=N"),
        (["--data", "digits"], "must look like CLAIM:/FOLDER"),
        (["--data", "Digits:/data"], "'Digits' is no name for Kubernetes"),
        (["--data", "digits..a:/data"], "'digits..a' is no name for Kubernetes"),
        (["--namespace", "Bad NS"], "'Bad NS' is no name for Kubernetes"),
        (["--namespace", ""], "'' is no name for Kubernetes"),
        (["--namespace", "-team"], "no dash at an end"),
        (["--namespace", "team.a"], "at most 63 small letters"),
        (["--namespace", "t" * 64], "at most 63 small letters"),
        (["--storage-class", "fast_disk"], "'fast_disk' is no name for Kubernetes"),
        (["--storage", "20 GB"], "'20 GB' is no size for Kubernetes"),
        (["--tag", "my tag"], "'my tag' is no tag"),
    ],
)
def test_options_that_are_wrong_are_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["kubernetes", str(COMPOSE), *options])
    assert done.exit_code == 2
    assert message in done.output


def test_the_longest_and_the_dotted_names_are_taken() -> None:
    options = ["--namespace", "t" * 63, "--storage-class", "fast.disks.example", "--data", "a.b:/data"]
    assert f"namespace: {'t' * 63}" in rendered(*options, "--storage", "1.5Ti", "--tag", "v1.2-rc_3")


def test_memory_and_variables_are_read_as_compose_reads_them() -> None:
    roles = read_roles(COMPOSE, {"WAFER_MEMORY": "512m"})
    assert {name: role.memory for name, role in roles.items()} == {
        "ingress": "4Gi",
        "management": "1Gi",
        "memoryx": "8Gi",
        "swarmx": "2Gi",
        "worker": "4Gi",
        "wafer": "512Mi",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not describe a cluster"),
        ("services: [wafer]", "does not describe a cluster"),
        ("services: {wafer: {}}", "'command'"),
        ("services: {wafer: {command: [wafer]}}", "wafer must listen at 0.0.0.0:7000"),
        ("services: {wafer: {command: ['0.0.0.0:7000'], mem_limit: lots}}", "write it as 8g or 512m"),
        ("{", "does not describe a cluster"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "file.yml").write_text(text)
    with pytest.raises(ComposeFileError, match=message):
        read_roles(tmp_path / "file.yml", {})


def test_without_the_file_the_way_out_is_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["kubernetes", str(tmp_path / "none.yml")])
    assert done.exit_code == 1
    assert "none.yml cannot be read (No such file or directory): leave it out, or name" in done.output


def test_too_few_workers_for_a_job_of_all_wafers_are_warned_of() -> None:
    def warnings(workers: int) -> str:
        scale = ["--scale", "wafer=4", "--scale", f"worker={workers}"]
        return CliRunner().invoke(app, ["kubernetes", str(COMPOSE), *scale]).stderr

    assert "at most 2 wafers of the 4. For jobs of all: --scale worker=4" in warnings(2)
    assert warnings(4) == ""
