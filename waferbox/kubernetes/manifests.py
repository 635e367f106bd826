"""All manifests of a cluster on Kubernetes, in the order in which they are to be applied, with the pod of each role."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from waferbox import deadlines, settings
from waferbox.kubernetes.compose_file import CACHE_FOLDER, LISTEN, METRICS_PORT, PORT, RoleSettings
from waferbox.roles import BY_NAME, INGRESS, MANAGEMENT, WAFER, WORKER
from waferbox.security.tokens import SECRET_FILE

# --- The pod of each role: one container that runs it, and one before it that lays out the secrets --------------------


Manifest = dict[str, Any]

APP: Final = "waferbox"
EVERY_ROLE: Final = {"app.kubernetes.io/name": APP}  # by which all pods are found
CLIENT_LABEL: Final = "waferbox-client"  # "true" on pods whose scripts use the cluster
CLIENTS: Final = {"namespaceSelector": {}, "podSelector": {"matchLabels": {CLIENT_LABEL: "true"}}}
PAGE_PORT: Final = 7001  # of management
_TLS_FOLDER: Final = "/var/lib/waferbox-tls"
_USER: Final = 1000  # of the images
_SECRET_FOLDER: Final = "/var/lib/waferbox-secret"
_GIVEN: Final = "/run/given"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What docker-compose.yml does not know."""

    namespace: str
    images: str  # where the images are, as a prefix of their names: registry.example/team/
    tag: str
    tls: bool
    storage: str  # of each role that keeps files
    storage_class: str  # empty: the default of Kubernetes
    data_claim: str  # a volume that input functions read; empty: none
    data_folder: str  # where the scripts and the workers see it


def labels(role: str) -> dict[str, str]:
    """By which the pods of a role are found."""
    return {**EVERY_ROLE, "app.kubernetes.io/component": role}


def ports(role: RoleSettings) -> dict[str, int]:
    """Those that can be known before; coordinators listen at others too."""
    found = {"grpc": PORT, "metrics": METRICS_PORT}
    if role.name == MANAGEMENT.name:
        found["page"] = PAGE_PORT
    return found


def pod(role: RoleSettings, options: ClusterOptions) -> Manifest:
    """The template of a role's pods."""
    spec = {
        **confined_pod(),
        "terminationGracePeriodSeconds": role.grace_seconds,
        "initContainers": [_secrets_container(role, options)],
        "containers": [_container(role, options)],
        "volumes": _volumes(role, options),
    }
    if BY_NAME[role.name].has_own_name:
        spec["hostname"] = role.name  # how it names itself to others
    else:
        spec["topologySpreadConstraints"] = [spread(labels(role.name))]
    if role.name == WORKER.name:
        spec["affinity"] = _beside(WAFER.name)
    return {"metadata": {"labels": labels(role.name)}, "spec": spec}


def confined_pod() -> Manifest:
    """What every pod has."""
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
    """Over hosts, as far as there are some."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(pods)},
    }


def _container(role: RoleSettings, options: ClusterOptions) -> Manifest:
    # Others reach a pod by its address, but those that have a service by its name, which is that of their host too.
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
        {"name": "HOME", "value": "/tmp"},  # all else cannot be written to
        {"name": settings.SECRET_FILE.name, "value": f"{_SECRET_FOLDER}/{SECRET_FILE}"},
    ]
    if options.tls:
        variables.append({"name": settings.TLS_DIR.name, "value": _TLS_FOLDER})
    return variables


def _probes(options: ClusterOptions) -> Mapping[str, Manifest]:
    """Kubernetes asks by itself where there is no TLS, of which its own probe knows nothing."""
    ask: Manifest = {"grpc": {"port": PORT}}
    if options.tls:
        ask = {"exec": {"command": ["sh", "-c", f"exec python -m waferbox.rpc.health_check $POD_IP:{PORT}"]}}
    every = {"periodSeconds": 10, "timeoutSeconds": 5}
    failures = int(deadlines.START.probe) // 2
    return {
        "startupProbe": {
            **ask,
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        },
        "readinessProbe": {**ask, **every},
        "livenessProbe": {**ask, **every, "failureThreshold": 3},
    }


def _secrets_container(role: RoleSettings, options: ClusterOptions) -> Manifest:
    """Copies them into memory: a process takes a secret only from a file that nobody but itself may read."""
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
    """Where Kubernetes finds an image of compose's."""
    return f"{options.images}{name}:{options.tag}"


def _beside(role: str) -> Manifest:
    """Rather on a host of that role than elsewhere."""
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels(role)}}
    preferred = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}


# --- All manifests of a cluster on Kubernetes, in the order in which they are to be applied ---------------------------


def cluster_manifests(roles: Mapping[str, RoleSettings], options: ClusterOptions) -> Sequence[Manifest]:
    """One list of objects. The secrets are not among them: they are made by hand, and lie in no file."""
    made = [*common(options), *_network_policies(options)]
    for role in roles.values():
        made += _of_role(role, options)
    return made


def common(options: ClusterOptions) -> Sequence[Manifest]:
    """What all else is in, and runs as."""
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
    """Writes out what is there twice: a name for it would be hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def as_text(manifests: Sequence[Manifest]) -> str:
    """One document for each."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False)


def head(version: str, kind: str, name: str, options: ClusterOptions) -> Manifest:
    """What every object begins with."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": options.namespace}}


def _of_role(role: RoleSettings, options: ClusterOptions) -> Sequence[Manifest]:
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
    """One pod, which others reach by the name of its service, with a volume that outlives it."""
    deployment: Manifest = {
        "replicas": role.count,
        "selector": {"matchLabels": labels(role.name)},
        "template": template,
        # Never two at once: they have one name, and one folder.
        "strategy": {"type": "Recreate"},
    }
    return [
        _service(role.name, template, options),
        {**head("v1", "PersistentVolumeClaim", f"{role.name}-cache", options), "spec": claim(options)},
        {**head("apps/v1", "Deployment", role.name, options), "spec": deployment},
        disruption_budget(role.name, labels(role.name), options),
    ]


def disruption_budget(name: str, pods: Mapping[str, str], options: ClusterOptions) -> Manifest:
    """Hosts are drained one of these pods at a time."""
    return {
        **head("policy/v1", "PodDisruptionBudget", name, options),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": dict(pods)}},
    }


def _service(name: str, template: Manifest, options: ClusterOptions) -> Manifest:
    """A name for the pods' own addresses: coordinators listen at ports that no service could list."""
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
    """Of a volume for a cache folder."""
    asked: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": options.storage}},
    }
    if options.storage_class:
        asked["storageClassName"] = options.storage_class
    return asked


def network_policy(
    name: str, pods: Manifest, sources: Sequence[Manifest], options: ClusterOptions, port: int | None = None
) -> Manifest:
    """Who reaches these pods, at one port or at all."""
    rule: Manifest = {"from": list(sources)}
    if port is not None:
        rule["ports"] = [{"protocol": "TCP", "port": port}]
    return {
        **head("networking.k8s.io/v1", "NetworkPolicy", name, options),
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [rule]},
    }


def _network_policies(options: ClusterOptions) -> Sequence[Manifest]:
    """The roles reach each other; scripts reach the ingress, and who looks on the page and the figures."""
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
