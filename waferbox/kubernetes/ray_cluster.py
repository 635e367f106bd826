"""The manifests of a cluster on Ray on Kubernetes: a RayCluster for the KubeRay operator, and a pod with `waferbox up`.

Each pod of the RayCluster has room for one process of a role, as large as docker-compose.yml says; a wafer's pod also
for its workers. The pod offers this room to Ray as a resource with the name of the role.
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
CLUSTER: Final = "waferbox"  # name of the RayCluster, and of the secret with Ray's token, which KubeRay makes
RAY_IMAGE: Final = "waferbox-ray"
RAY_LABEL: Final = "waferbox-ray"  # on all pods of the cluster; its value is the kind of the pod
GROUPS: Final = tuple(role.name for role in (MEMORYX, SWARMX, WAFER))  # the roles that have pods of their own
_GCS_PORT: Final = 6379
_NODE_PORT: Final = 6380
_OBJECT_STORE_BYTES: Final = 100_000_000  # of each Ray node; tensors do not use it
_OVERHEAD_BYTES: Final = 2**30  # of a Ray node, with an actor for each process


def ray_manifests(roles: Mapping[str, RoleSettings], options: ClusterOptions, wafer_cpus: int) -> Sequence[Manifest]:
    """The objects of a cluster on Ray, without the secrets.

    Args:
        roles: by name.
        options: of the cluster.
        wafer_cpus: processors of each wafer, and so its threads.

    Raises:
        ComposeFileError: a role that is needed has no process.
    """
    for name in (*GROUPS, WORKER.name, MANAGEMENT.name, INGRESS.name):
        if name not in roles or not roles[name].count:
            raise ComposeFileError(f"a cluster on Ray needs at least one {name}")
    everyone = {"matchExpressions": [{"key": RAY_LABEL, "operator": "Exists"}]}
    return [
        *common(options),
        # A script connects to management, to its coordinator, which has any port on the same host, and to MemoryX.
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
    """The head group of the RayCluster: a pod without processors for Ray, which therefore runs no role."""
    parameters = {**_ray_parameters(cpus=0, resources={}), "port": str(_GCS_PORT), "include-dashboard": "false"}
    template = _ray_pod("head", 2 * _OVERHEAD_BYTES, {"emptyDir": {}}, _GCS_PORT, options)
    (container,) = template["spec"]["containers"]
    container["ports"] = [{"name": "gcs-server", "containerPort": _GCS_PORT}]
    return {"rayStartParams": parameters, "template": template}


def _worker_group(
    role: RoleSettings, roles: Mapping[str, RoleSettings], options: ClusterOptions, wafer_cpus: int
) -> Manifest:
    """A worker group of the RayCluster, with a pod for each process of the role."""
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
    """The parameters of `ray start`, quoted for a shell."""
    parameters = {
        "num-cpus": str(cpus),
        "node-manager-port": str(_NODE_PORT),
        "object-store-memory": str(_OBJECT_STORE_BYTES),
    }
    if resources:
        parameters["resources"] = json.dumps(json.dumps(resources))  # the outer call quotes for the shell
    return parameters


def _ray_pod(name: str, memory: int, cache: Manifest, port: int, options: ClusterOptions) -> Manifest:
    """The template of a pod with a Ray node, to which KubeRay adds the command. port: of its health service."""
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
    """A pod that runs `waferbox up`; it joins Ray without processors, since `up` needs a Ray node on its host."""
    role = replace(roles[MANAGEMENT.name], image=RAY_IMAGE)
    template = pod(role, options)
    template["metadata"]["labels"][RAY_LABEL] = role.name
    (container,) = template["spec"]["containers"]
    join = f"ray start --address={CLUSTER}-head-svc:{_GCS_PORT} --node-ip-address=$POD_IP"
    join += "".join(f" --{name}={value}" for name, value in _ray_parameters(cpus=0, resources={}).items())
    container["command"] = ["sh", "-c"]
    container["args"] = [f"{join} && exec python -m waferbox {' '.join(_up_arguments(roles, options, wafer_cpus))}"]
    container["ports"] = [{"name": "grpc", "containerPort": PORT}]
    # Coordinators run in this pod, and not, as without Ray, beside the ingress.
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


def _up_arguments(roles: Mapping[str, RoleSettings], options: ClusterOptions, wafer_cpus: int) -> Sequence[str]:
    """The arguments of `waferbox up`."""
    arguments = ["up", "--engine", "ray", "--address", "auto", "--listen", f"$POD_IP:{PORT}"]
    # Without TLS the network policy alone restricts access.
    arguments += [] if options.tls else ["--insecure"]
    for role in LEASED:
        arguments += [f"--{role.count_option}", str(roles[role.name].count)]
    for name in GROUPS:
        arguments += ["--resource", f"{name}.{name}=1"]
    return [*arguments, "--resource", f"{WAFER.name}.CPU={wafer_cpus}"]


def _workers_of_a_wafer(roles: Mapping[str, RoleSettings]) -> int:
    return math.ceil(roles[WORKER.name].count / roles[WAFER.name].count)


def _memory(size: int) -> Manifest:
    return {"requests": {"memory": _quantity(size)}, "limits": {"memory": _quantity(size)}}


def _quantity(size: int) -> str:
    """A number of bytes as Kubernetes writes it."""
    return f"{math.ceil(size / 2**20)}Mi"
