"""The manifests of a cluster on Kubernetes, in the order in which they are applied, with the pod of each role."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from waferbox import deadlines, settings
from waferbox.kubernetes.compose_file import CACHE_FOLDER, FOLLOWERS, LISTEN, METRICS_PORT, PORT, RoleSettings
from waferbox.roles import BY_NAME, INGRESS, MANAGEMENT, WAFER, WORKER
from waferbox.security.tokens import SECRET_FILE

# --- The pod of each role ---------------------------------------------------------------------------------------------


Manifest = dict[str, Any]

APP: Final = "waferbox"
EVERY_ROLE: Final = {"app.kubernetes.io/name": APP}  # the label of all pods
CLIENT_LABEL: Final = "waferbox-client"  # "true" on pods whose scripts use the cluster
CLIENTS: Final = {"namespaceSelector": {}, "podSelector": {"matchLabels": {CLIENT_LABEL: "true"}}}
PAGE_PORT: Final = 7001  # of management's page
_TLS_FOLDER: Final = "/var/lib/waferbox-tls"
_USER: Final = 1000  # of the images
_SECRET_FOLDER: Final = "/var/lib/waferbox-secret"
_GIVEN: Final = "/run/given"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Settings of a cluster on Kubernetes that docker-compose.yml does not have."""

    namespace: str
    images: str  # prefix of the images' names: registry.example/team/
    tag: str
    tls: bool
    storage: str  # size of the volume of each role that keeps files
    storage_class: str  # of these volumes; empty: the default of Kubernetes
    data_claim: str  # the claim of a volume that input functions read; empty: none
    data_folder: str  # the path of this volume in scripts and workers


def labels(role: str) -> dict[str, str]:
    """The labels of a role's pods."""
    return {**EVERY_ROLE, "app.kubernetes.io/component": role}


def ports(role: RoleSettings) -> dict[str, int]:
    """The fixed ports of a role, by name; coordinators listen at other ports too."""
    found = {"grpc": PORT, "metrics": METRICS_PORT}
    if role.name == MANAGEMENT.name:
        found["page"] = PAGE_PORT
    return found


def pod(role: RoleSettings, options: ClusterOptions) -> Manifest:
    """The template of a role's pods: a container that runs the role, after one that copies the secrets."""
    spec = {
        **confined_pod(),
        "terminationGracePeriodSeconds": role.grace_seconds,
        "initContainers": [_secrets_container(role, options)],
        "containers": [_container(role, options)],
        "volumes": _volumes(role, options),
    }
    if BY_NAME[role.name].has_own_name:
        spec["hostname"] = role.name  # the process announces its address by its host's name
    else:
        spec["topologySpreadConstraints"] = [spread(labels(role.name))]
    if role.name in FOLLOWERS:
        spec["affinity"] = _beside(WAFER.name)
    return {"metadata": {"labels": labels(role.name)}, "spec": spec}


def confined_pod() -> Manifest:
    """The part of the specification that every pod has."""
    return {
        "serviceAccountName": APP,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def spread(pods: Mapping[str, str]) -> Manifest:
    """The constraint that spreads pods with these labels over hosts, as far as possible."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(pods)},
    }


def _container(role: RoleSettings, options: ClusterOptions) -> Manifest:
    # A pod is reached by its address, but a role with a service by the service's name, which is its host name too.
    host = "0.0.0.0" if BY_NAME[role.name].has_own_name else "$(POD_IP)"
    mounts: list[Manifest] = [
        {"name": "secret", "mountPath": _SECRET_FOLDER},
        {"name": "temporary", "mountPath": "/tmp"},
        {"name": "cache", "mountPath": CACHE_FOLDER},
    ]
    if options.tls:
        mounts.append({"name": "tls", "mountPath": _TLS_FOLDER})
    if role.name == WORKER.name and options.data_claim:
        mounts.append({"name": "data", "mountPath": options.data_folder, "readOnly": True})
    return {
        "name": role.name,
        "image": image(role.image, options),
        "args": [f"{host}:{PORT}" if word == LISTEN else word for word in role.arguments],
        "env": _environment(options),
        "ports": [{"name": name, "containerPort": port} for name, port in ports(role).items()],
        "resources": {"requests": {"memory": role.memory}, "limits": {"memory": role.memory}},
        "volumeMounts": mounts,
        "securityContext": CONFINED,
        **_probes(options),
    }


CONFINED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def _environment(options: ClusterOptions) -> Sequence[Manifest]:
    variables: list[Manifest] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": "/tmp"},  # the file system of the image is read-only
        {"name": settings.SECRET_FILE.name, "value": f"{_SECRET_FOLDER}/{SECRET_FILE}"},
    ]
    if options.tls:
        variables.append({"name": settings.TLS_DIR.name, "value": _TLS_FOLDER})
    return variables


def _probes(options: ClusterOptions) -> Mapping[str, Manifest]:
    """The health probes of a role: the gRPC probe of Kubernetes, or a command with TLS, which that probe lacks."""
    check: Manifest = {"grpc": {"port": PORT}}
    if options.tls:
        check = {"exec": {"command": ["sh", "-c", f"exec python -m waferbox.rpc.health_check $POD_IP:{PORT}"]}}
    every = {"periodSeconds": 10, "timeoutSeconds": 5}
    failures = int(deadlines.START.probe) // 2
    return {
        "startupProbe": {
            **check,
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        },
        "readinessProbe": {**check, **every},
        "livenessProbe": {**check, **every, "failureThreshold": 3},
    }


def _secrets_container(role: RoleSettings, options: ClusterOptions) -> Manifest:
    """The container that copies the secrets into memory: a process accepts a secret only from a private file."""
    folders = {"secret": _SECRET_FOLDER, **({"tls": _TLS_FOLDER} if options.tls else {})}
    commands = [f"install -m 600 {_GIVEN}/{name}/* {folder}/" for name, folder in folders.items()]
    mounts: list[Manifest] = []
    for name, folder in folders.items():
        mounts.append({"name": name, "mountPath": folder})
        mounts.append({"name": f"given-{name}", "mountPath": f"{_GIVEN}/{name}", "readOnly": True})
    return {
        "name": "secrets",
        "image": image(role.image, options),
        "command": ["sh", "-c", " && ".join(commands)],
        "resources": {"requests": {"memory": "16Mi"}, "limits": {"memory": "64Mi"}},
        "volumeMounts": mounts,
        "securityContext": CONFINED,
    }


def _volumes(role: RoleSettings, options: ClusterOptions) -> Sequence[Manifest]:
    volumes: list[Manifest] = [
        {"name": "secret", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "given-secret", "secret": {"secretName": f"{APP}-secret", "defaultMode": 0o440}},
        {"name": "temporary", "emptyDir": {}},
    ]
    if BY_NAME[role.name].has_own_name:
        volumes.append({"name": "cache", "persistentVolumeClaim": {"claimName": f"{role.name}-cache"}})
    elif not role.keeps_files:
        volumes.append({"name": "cache", "emptyDir": {}})
    if options.tls:
        volumes.append({"name": "tls", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
        volumes.append({"name": "given-tls", "secret": {"secretName": f"{APP}-tls", "defaultMode": 0o440}})
    if role.name == WORKER.name and options.data_claim:
        claim = {"claimName": options.data_claim, "readOnly": True}
        volumes.append({"name": "data", "persistentVolumeClaim": claim})
    return volumes


def image(name: str, options: ClusterOptions) -> str:
    """The full name of an image that docker-compose.yml names."""
    return f"{options.images}{name}:{options.tag}"


def _beside(role: str) -> Manifest:
    """The affinity that prefers hosts on which a role's pods run."""
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels(role)}}
    preferred = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}


# --- The manifests of a cluster ---------------------------------------------------------------------------------------


def cluster_manifests(roles: Mapping[str, RoleSettings], options: ClusterOptions) -> Sequence[Manifest]:
    """The objects of a cluster, without the secrets, which a user creates by hand so that no file contains them."""
    manifests = [*common(options), *_network_policies(options)]
    for role in roles.values():
        manifests += _role_manifests(role, options)
    return manifests


def common(options: ClusterOptions) -> Sequence[Manifest]:
    """The namespace and the service account of a cluster."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": options.namespace,
                "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
            },
        },
        {**head("v1", "ServiceAccount", APP, options), "automountServiceAccountToken": False},
    ]


class _Dumper(yaml.SafeDumper):
    """Writes out repeated objects, since YAML's aliases are hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def as_text(manifests: Sequence[Manifest]) -> str:
    """The manifests as YAML documents."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False)


def head(version: str, kind: str, name: str, options: ClusterOptions) -> Manifest:
    """The first fields of an object."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": options.namespace}}


def _role_manifests(role: RoleSettings, options: ClusterOptions) -> Sequence[Manifest]:
    template = pod(role, options)
    if BY_NAME[role.name].has_own_name:
        return named_role(role, template, options)
    selector = labels(role.name)
    disruption = disruption_budget(role.name, selector, options)
    spec: Manifest = {"replicas": role.count, "selector": {"matchLabels": selector}, "template": template}
    if not role.keeps_files:
        return [{**head("apps/v1", "Deployment", role.name, options), "spec": spec}, disruption]
    stateful = {
        **spec,
        "serviceName": role.name,
        "podManagementPolicy": "Parallel",
        "volumeClaimTemplates": [{"metadata": {"name": "cache"}, "spec": claim(options)}],
    }
    return [
        _service(role.name, template, options),
        {**head("apps/v1", "StatefulSet", role.name, options), "spec": stateful},
        disruption,
    ]


def named_role(role: RoleSettings, template: Manifest, options: ClusterOptions) -> Sequence[Manifest]:
    """The objects of a role with one pod, which is reached by the name of its service and has a lasting volume."""
    deployment: Manifest = {
        "replicas": role.count,
        "selector": {"matchLabels": labels(role.name)},
        "template": template,
        # Two pods must never run at once: they would share a name and a folder.
        "strategy": {"type": "Recreate"},
    }
    return [
        _service(role.name, template, options),
        {**head("v1", "PersistentVolumeClaim", f"{role.name}-cache", options), "spec": claim(options)},
        {**head("apps/v1", "Deployment", role.name, options), "spec": deployment},
        disruption_budget(role.name, labels(role.name), options),
    ]


def disruption_budget(name: str, pods: Mapping[str, str], options: ClusterOptions) -> Manifest:
    """The budget by which drained hosts lose at most one of these pods at a time."""
    return {
        **head("policy/v1", "PodDisruptionBudget", name, options),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": dict(pods)}},
    }


def _service(name: str, template: Manifest, options: ClusterOptions) -> Manifest:
    """A headless service, whose name stands for the pods' addresses: a service cannot list coordinators' ports."""
    (container,) = template["spec"]["containers"]
    return {
        **head("v1", "Service", name, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(name),
            "ports": [{"name": port["name"], "port": port["containerPort"]} for port in container["ports"]],
        },
    }


def claim(options: ClusterOptions) -> Manifest:
    """The specification of a volume claim for a cache folder."""
    spec: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": options.storage}},
    }
    if options.storage_class:
        spec["storageClassName"] = options.storage_class
    return spec


def network_policy(
    name: str, pods: Manifest, sources: Sequence[Manifest], options: ClusterOptions, port: int | None = None
) -> Manifest:
    """The policy that lets only these sources reach these pods, at one port or at all ports."""
    rule: Manifest = {"from": list(sources)}
    if port is not None:
        rule["ports"] = [{"protocol": "TCP", "port": port}]
    return {
        **head("networking.k8s.io/v1", "NetworkPolicy", name, options),
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [rule]},
    }


def _network_policies(options: ClusterOptions) -> Sequence[Manifest]:
    """The policies by which roles reach each other, and clients reach the ingress and management's page."""
    everyone = {"matchLabels": EVERY_ROLE}
    between = network_policy("between-roles", everyone, [{"podSelector": everyone}], options)
    opened = {"clients-to-ingress": (INGRESS.name, PORT), "clients-to-page": (MANAGEMENT.name, PAGE_PORT)}
    return [
        between,
        *(
            network_policy(name, {"matchLabels": labels(role)}, [CLIENTS], options, port)
            for name, (role, port) in opened.items()
        ),
    ]
