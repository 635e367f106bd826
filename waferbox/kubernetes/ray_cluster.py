"""A cluster on Kubernetes by way of Ray: a RayCluster, which the KubeRay operator runs, and `waferbox up` beside it.

Each pod of the RayCluster has room for one process of a role, a wafer's for its workers too, and offers it to Ray as a
resource with the name of the role. So all of them are as large as docker-compose.yml says.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from waferbox import deadlines
from waferbox.kubernetes.compose_file import CACHE_FOLDER, PORT, ComposeFileError, RoleSettings
from waferbox.kubernetes.manifests import (
    CLIENTS,
    CONFINED,
    ClusterOptions,
    Manifest,
    claim,
    common,
    confined_pod,
    disruption_budget,
    head,
    image,
    named_role,
    network_policy,
    pod,
    spread,
)
from waferbox.roles import INGRESS, LEASED, MANAGEMENT, MEMORYX, SWARMX, WAFER, WORKER

RAY_VERSION: Final = "2.60.0"  # of the image
CLUSTER: Final = "waferbox"  # and the secret with Ray's token, which KubeRay makes, has its name
RAY_IMAGE: Final = "waferbox-ray"
RAY_LABEL: Final = "waferbox-ray"  # on all pods of this cluster, and what each is
GROUPS: Final = tuple(role.name for role in (MEMORYX, SWARMX, WAFER))  # the roles that have pods of their own
_GCS_PORT: Final = 6379
_NODE_PORT: Final = 6380
_OBJECT_STORE_BYTES: Final = 100_000_000  # of each node of Ray; no tensor of ours is ever in it
_OVERHEAD_BYTES: Final = 2**30  # of a node of Ray, and an actor for each process


def ray_manifests(roles: Mapping[str, RoleSettings], options: ClusterOptions, wafer_cpus: int) -> Sequence[Manifest]:
    """One list of objects, as of cluster_manifests. wafer_cpus: of each wafer, and so its threads.

    Raises ComposeFileError.
    """
    for name in (*GROUPS, WORKER.name, MANAGEMENT.name, INGRESS.name):
        if name not in roles or not roles[name].count:
            raise ComposeFileError(f"on Ray there is at least one {name}")
    everyone = {"matchExpressions": [{"key": RAY_LABEL, "operator": "Exists"}]}
    return [
        *common(options),
        # A script asks management, its coordinator, at any port beside it, and MemoryX.
        network_policy("within-ray", everyone, [{"podSelector": everyone}, CLIENTS], options),
        {
            **head("ray.io/v1", "RayCluster", CLUSTER, options),
            "spec": {
                "rayVersion": RAY_VERSION,
                "authOptions": {"mode": "token"},
                "headGroupSpec": _head_group(options),
                "workerGroupSpecs": [_worker_group(roles[name], roles, options, wafer_cpus) for name in GROUPS],
            },
        },
        *(disruption_budget(f"ray-{name}", {RAY_LABEL: name}, options) for name in GROUPS),
        *named_role(roles[MANAGEMENT.name], _management(roles, options, wafer_cpus), options),
    ]


def _head_group(options: ClusterOptions) -> Manifest:
    """Runs no role: it takes part in Ray with no processor."""
    parameters = {**_ray_parameters(cpus=0, resources={}), "port": str(_GCS_PORT), "include-dashboard": "false"}
    template = _ray_pod("head", 2 * _OVERHEAD_BYTES, {"emptyDir": {}}, _GCS_PORT, options)
    (container,) = template["spec"]["containers"]
    container["ports"] = [{"name": "gcs-server", "containerPort": _GCS_PORT}]
    return {"rayStartParams": parameters, "template": template}


def _worker_group(
    role: RoleSettings, roles: Mapping[str, RoleSettings], options: ClusterOptions, wafer_cpus: int
) -> Manifest:
    """As many pods as there are processes of the role."""
    workers = _workers_of_a_wafer(roles) if role.name == WAFER.name else 0
    memory = role.memory_bytes + workers * roles[WORKER.name].memory_bytes + _OVERHEAD_BYTES
    cpus = math.ceil(workers * WORKER.default_cpus) + (wafer_cpus if role.name == WAFER.name else 1)
    cache: Manifest = {"emptyDir": {}}
    if role.keeps_files:
        cache = {"ephemeral": {"volumeClaimTemplate": {"spec": claim(options)}}}
    template = _ray_pod(role.name, memory, cache, _NODE_PORT, options)
    (container,) = template["spec"]["containers"]
    container["resources"]["requests"]["cpu"] = str(cpus)
    if role.name == WAFER.name and options.data_claim:
        data = {"claimName": options.data_claim, "readOnly": True}
        template["spec"]["volumes"].append({"name": "data", "persistentVolumeClaim": data})
        container["volumeMounts"].append({"name": "data", "mountPath": options.data_folder, "readOnly": True})
    return {
        "groupName": role.name,
        "replicas": role.count,
        "minReplicas": role.count,
        "maxReplicas": role.count,
        "rayStartParams": _ray_parameters(cpus=cpus, resources={role.name: 1}),
        "template": template,
    }


def _ray_parameters(*, cpus: int, resources: Mapping[str, int]) -> dict[str, str]:
    """Of `ray start`, which a shell is given."""
    parameters = {
        "num-cpus": str(cpus),
        "node-manager-port": str(_NODE_PORT),
        "object-store-memory": str(_OBJECT_STORE_BYTES),
    }
    if resources:
        parameters["resources"] = json.dumps(json.dumps(resources))  # quoted once more
    return parameters


def _ray_pod(name: str, memory: int, cache: Manifest, port: int, options: ClusterOptions) -> Manifest:
    """A node of Ray, which KubeRay gives the command. port: of what tells its health."""
    health: Manifest = {"grpc": {"port": port}, "periodSeconds": 10, "timeoutSeconds": 5}
    container: Manifest = {
        "name": f"ray-{name}",
        "image": image(RAY_IMAGE, options),
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
        "resources": _memory(memory),
        "volumeMounts": [{"name": "temporary", "mountPath": "/tmp"}, {"name": "cache", "mountPath": CACHE_FOLDER}],
        "securityContext": CONFINED,
        "startupProbe": {**health, "periodSeconds": 2, "failureThreshold": int(deadlines.START.probe) // 2},
        "readinessProbe": dict(health),
        "livenessProbe": {**health, "failureThreshold": 3},
    }
    found_by = {RAY_LABEL: name}
    spec = {
        **confined_pod(),
        "topologySpreadConstraints": [spread(found_by)],
        "containers": [container],
        "volumes": [{"name": "temporary", "emptyDir": {}}, {"name": "cache", **cache}],
    }
    return {"metadata": {"labels": found_by}, "spec": spec}


def _management(roles: Mapping[str, RoleSettings], options: ClusterOptions, wafer_cpus: int) -> Manifest:
    """A pod that joins Ray with no processor, so that there is a Ray on its host, and runs `waferbox up` there."""
    role = replace(roles[MANAGEMENT.name], image=RAY_IMAGE)
    template = pod(role, options)
    template["metadata"]["labels"][RAY_LABEL] = role.name
    (container,) = template["spec"]["containers"]
    join = f"ray start --address={CLUSTER}-head-svc:{_GCS_PORT} --node-ip-address=$POD_IP"
    join += "".join(f" --{name}={value}" for name, value in _ray_parameters(cpus=0, resources={}).items())
    container["command"] = ["sh", "-c"]
    container["args"] = [f"{join} && exec python -m waferbox {' '.join(_up(roles, options, wafer_cpus))}"]
    container["ports"] = [{"name": "grpc", "containerPort": PORT}]
    # Coordinators run here too, which are with the ingress elsewhere.
    container["resources"] = _memory(role.memory_bytes + roles[INGRESS.name].memory_bytes + _OVERHEAD_BYTES)
    container["env"] += [
        {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": CLUSTER, "key": "auth_token"}}},
    ]
    container["volumeMounts"].append({"name": "shared-memory", "mountPath": "/dev/shm"})
    shared = {"medium": "Memory", "sizeLimit": _quantity(2 * _OBJECT_STORE_BYTES)}
    template["spec"]["volumes"].append({"name": "shared-memory", "emptyDir": shared})
    return template


def _up(roles: Mapping[str, RoleSettings], options: ClusterOptions, wafer_cpus: int) -> Sequence[str]:
    """The words of the command."""
    words = ["up", "--engine", "ray", "--address", "auto", "--listen", f"$POD_IP:{PORT}"]
    # Without TLS the network policy keeps others out.
    words += [] if options.tls else ["--insecure"]
    for role in LEASED:
        words += [f"--{role.count_option}", str(roles[role.name].count)]
    for name in GROUPS:
        words += ["--resource", f"{name}.{name}=1"]
    return [*words, "--resource", f"{WAFER.name}.CPU={wafer_cpus}"]


def _workers_of_a_wafer(roles: Mapping[str, RoleSettings]) -> int:
    return math.ceil(roles[WORKER.name].count / roles[WAFER.name].count)


def _memory(size: int) -> Manifest:
    return {"requests": {"memory": _quantity(size)}, "limits": {"memory": _quantity(size)}}


def _quantity(size: int) -> str:
    """As Kubernetes writes bytes."""
    return f"{math.ceil(size / 2**20)}Mi"
