"""The manifests of a cluster on Ray, for KubeRay: as far as published schemas go, and room for what is to run there."""

import shlex
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import typer
import yaml
from test_kubernetes import COMPOSE, EVERYTHING, ROOT, SCHEMAS, nothing_of_the_environment, rendered
from typer.testing import CliRunner

from waferbox.commands.cli import app
from waferbox.ray_engine.settings import lay_out, parse_resources

__all__ = ["nothing_of_the_environment"]  # a fixture for all tests here too

RENDERED = ROOT / "deploy" / "kubernetes" / "raycluster.yaml"
# Of ray.io/v1, as KubeRay 1.5 to 1.7 define it: those that are written here. There is no package of such definitions.
FIELDS = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD_FIELDS = {"rayStartParams", "template"}
GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
COUNTS = {"--wafers": "wafer", "--memoryx": "memoryx", "--swarmx": "swarmx", "--workers": "workers"}  # and modules
plain_and_all = pytest.mark.parametrize("options", [[], EVERYTHING], ids=["plain", "everything"])


def manifests(*options: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(rendered("--ray", *options)))


def ray_cluster(*options: str) -> Mapping[str, Any]:
    (found,) = (each for each in manifests(*options) if each["kind"] == "RayCluster")
    return dict(found)


def groups(*options: str) -> dict[str, Mapping[str, Any]]:
    return {group["groupName"]: group for group in ray_cluster(*options)["spec"]["workerGroupSpecs"]}


def management(*options: str) -> Mapping[str, Any]:
    (found,) = (each for each in manifests(*options) if each["kind"] == "Deployment")
    return dict(found["spec"]["template"])


def templates(*options: str) -> Iterator[Mapping[str, Any]]:
    yield ray_cluster(*options)["spec"]["headGroupSpec"]["template"]
    for group in groups(*options).values():
        yield group["template"]
    yield management(*options)


def command(*options: str) -> tuple[list[str], list[str]]:
    """Of the pod of management: the words that join Ray, and those of `waferbox up`."""
    (container,) = management(*options)["spec"]["containers"]
    join, _, then = container["args"][0].partition(" && exec python -m waferbox ")
    assert container["command"] == ["sh", "-c"]
    return shlex.split(join), shlex.split(then)


def as_template(template: Mapping[str, Any]) -> dict[str, Any]:
    """An object of its own, of which there is a schema."""
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": deepcopy(template)}


@plain_and_all
def test_they_are_valid(options: list[str]) -> None:
    import kubernetes_validate

    made = manifests(*options)
    for manifest in made:
        if manifest["kind"] != "RayCluster":
            kubernetes_validate.validate(manifest, SCHEMAS, strict=True)
    for template in templates(*options):
        kubernetes_validate.validate(as_template(template), SCHEMAS, strict=True)
    cluster = ray_cluster(*options)
    assert cluster["apiVersion"] == "ray.io/v1"
    assert cluster["spec"].keys() == FIELDS
    assert cluster["spec"]["headGroupSpec"].keys() == HEAD_FIELDS
    for group in groups(*options).values():
        assert group.keys() == GROUP_FIELDS
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in made]
    assert len(set(names)) == len(names)
    assert {manifest["metadata"].get("namespace") for manifest in made[1:]} == {"team" if options else "waferbox"}


def test_the_schema_of_pods_refuses_what_is_wrong() -> None:
    import kubernetes_validate

    broken = as_template(groups()["wafer"]["template"])
    broken["template"]["spec"]["containers"][0]["imagee"] = "waferbox"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, SCHEMAS, strict=True)


def test_the_file_in_the_repository_is_what_the_command_prints() -> None:
    command = "waferbox kubernetes --ray > deploy/kubernetes/raycluster.yaml"
    assert RENDERED.read_text() == rendered("--ray"), f"stale: run `{command}`"


@plain_and_all
def test_ray_and_waferbox_take_the_options_that_they_are_given(options: list[str]) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed: pip install 'waferbox[ray]'")
    spec = ray_cluster(*options)["spec"]
    given = [group["rayStartParams"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    for parameters in given:
        words = shlex.split(" ".join(f"--{name}={value}" for name, value in parameters.items()))
        assert scripts.start.make_context("start", words).params["node_manager_port"] == 6380
    join, up = command(*options)
    assert join[:2] == ["ray", "start"]
    assert scripts.start.make_context("start", join[2:]).params["address"] == "waferbox-head-svc:6379"
    commands: Any = typer.main.get_command(app)
    asked = commands.commands["up"].make_context("up", up[1:]).params
    count = dict(
        zip(("wafers", "memoryx", "swarmx", "workers"), (4, 4, 4, 8) if options else (1, 2, 2, 2), strict=True)
    )
    assert {option: asked[option] for option in count} == count
    assert asked["insecure"] == (not options)


@plain_and_all
def test_all_that_is_started_has_room_and_no_pod_is_left_over(options: list[str]) -> None:
    """One bundle for each pod, which has its processors and is of its role."""
    _, up = command(*options)
    resources = parse_resources([word for before, word in pairwise(up) if before == "--resource"])
    count = {COUNTS[before]: int(word) for before, word in pairwise(up) if before in COUNTS}
    layout = lay_out(count, resources)
    made = groups(*options)
    bundles = {name: [b for b in layout.bundles if name in b] for name in made}
    assert sum(map(len, bundles.values())) == len(layout.bundles)
    for name, group in made.items():
        offered = shlex.split(group["rayStartParams"]["resources"])[0]
        assert yaml.safe_load(offered) == {name: 1}
        assert len(bundles[name]) == group["replicas"]
        assert max(b["CPU"] for b in bundles[name]) <= int(group["rayStartParams"]["num-cpus"])


def test_a_pod_is_as_large_as_what_runs_there() -> None:
    gibibytes = {}
    for name, group in groups(*EVERYTHING).items():
        (container,) = group["template"]["spec"]["containers"]
        gibibytes[name] = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) / 1024
    assert gibibytes == {"memoryx": 8 + 1, "swarmx": 2 + 1, "wafer": 8 + 2 * 4 + 1}


@plain_and_all
def test_all_containers_are_confined_and_looked_after(options: list[str]) -> None:
    for template in templates(*options):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        (container,) = pod["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
        assert template["metadata"]["labels"]["waferbox-ray"]
    budgets = {each["metadata"]["name"] for each in manifests(*options) if each["kind"] == "PodDisruptionBudget"}
    assert budgets == {"ray-memoryx", "ray-swarmx", "ray-wafer", "management"}


@plain_and_all
def test_secrets_are_with_management_and_files_where_recovery_points_are(options: list[str]) -> None:
    """What runs on Ray is given its secrets by the actors."""
    secrets = [v["secret"]["secretName"] for v in management(*options)["spec"]["volumes"] if "secret" in v]
    assert secrets == (["waferbox-secret", "waferbox-tls"] if options else ["waferbox-secret"])
    for name, group in groups(*options).items():
        volumes = {volume.pop("name"): volume for volume in deepcopy(group["template"]["spec"]["volumes"])}
        assert ("ephemeral" in volumes["cache"]) == (name != "swarmx")
        assert ("data" in volumes) == (name == "wafer" and bool(options))
        assert not any("secret" in volume for volume in volumes.values())


@pytest.mark.parametrize("scale", ["wafer=0", "swarmx=0"])
def test_a_role_that_ray_would_lack_is_refused(scale: str) -> None:
    done = CliRunner().invoke(app, ["kubernetes", str(COMPOSE), "--ray", "--scale", scale])
    assert done.exit_code == 1
    assert f"a cluster on Ray needs at least one {scale[:-2]}" in done.output


def test_the_image_has_the_ray_that_the_manifest_names() -> None:
    version = ray_cluster()["spec"]["rayVersion"]
    assert f"RUN pip install ray=={version}\n" in (ROOT / "Dockerfile").read_text()
