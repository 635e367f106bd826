"""All manifests of a cluster on Kubernetes, in the order in which they are to be applied."""

from collections.abc import Mapping, Sequence

import yaml

from waferbox.kubernetes.compose_file import PORT, RoleSettings
from waferbox.kubernetes.pods import (
    APP,
    CLIENT_LABEL,
    EVERY_ROLE,
    NAMED_ROLES,
    PAGE_PORT,
    ClusterOptions,
    Manifest,
    labels,
    pod,
    ports,
)


def cluster_manifests(roles: Mapping[str, RoleSettings], options: ClusterOptions) -> Sequence[Manifest]:
    """One list of objects. The secrets are not among them: they are made by hand, and lie in no file."""
    made: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": options.namespace,
                "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
            },
        },
        {**_head("v1", "ServiceAccount", APP, options), "automountServiceAccountToken": False},
        *_network_policies(options),
    ]
    for role in roles.values():
        made += _of_role(role, options)
    return made


class _Dumper(yaml.SafeDumper):
    """Writes out what is there twice: a name for it would be hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def as_text(manifests: Sequence[Manifest]) -> str:
    """One document for each."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False)


def _head(version: str, kind: str, name: str, options: ClusterOptions) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": options.namespace}}


def _of_role(role: RoleSettings, options: ClusterOptions) -> Sequence[Manifest]:
    selector = {"matchLabels": labels(role.name)}
    disruption = {
        **_head("policy/v1", "PodDisruptionBudget", role.name, options),
        "spec": {"maxUnavailable": 1, "selector": selector},
    }
    spec: Manifest = {"replicas": role.count, "selector": selector, "template": pod(role, options)}
    if role.name in NAMED_ROLES:
        # Never two at once: they have one name, and one folder.
        deployment = {**spec, "strategy": {"type": "Recreate"}}
        return [
            _service(role, options),
            {**_head("v1", "PersistentVolumeClaim", f"{role.name}-cache", options), "spec": _claim(options)},
            {**_head("apps/v1", "Deployment", role.name, options), "spec": deployment},
            disruption,
        ]
    if not role.keeps_files:
        return [{**_head("apps/v1", "Deployment", role.name, options), "spec": spec}, disruption]
    stateful = {
        **spec,
        "serviceName": role.name,
        "podManagementPolicy": "Parallel",
        "volumeClaimTemplates": [{"metadata": {"name": "cache"}, "spec": _claim(options)}],
    }
    return [
        _service(role, options),
        {**_head("apps/v1", "StatefulSet", role.name, options), "spec": stateful},
        disruption,
    ]


def _service(role: RoleSettings, options: ClusterOptions) -> Manifest:
    """A name for the pods' own addresses: coordinators listen at ports that no service could list."""
    return {
        **_head("v1", "Service", role.name, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(role.name),
            "ports": [{"name": name, "port": port} for name, port in ports(role).items()],
        },
    }


def _claim(options: ClusterOptions) -> Manifest:
    claim: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": options.storage}},
    }
    if options.storage_class:
        claim["storageClassName"] = options.storage_class
    return claim


def _network_policies(options: ClusterOptions) -> Sequence[Manifest]:
    """The roles reach each other; scripts reach the ingress, and who looks on the page and the figures."""
    everyone = {"podSelector": {"matchLabels": EVERY_ROLE}}
    clients = {"namespaceSelector": {}, "podSelector": {"matchLabels": {CLIENT_LABEL: "true"}}}

    def policy(name: str, pods: Mapping[str, str], source: Manifest, port: int | None = None) -> Manifest:
        rule: Manifest = {"from": [source]}
        if port is not None:
            rule["ports"] = [{"protocol": "TCP", "port": port}]
        return {
            **_head("networking.k8s.io/v1", "NetworkPolicy", name, options),
            "spec": {"podSelector": {"matchLabels": dict(pods)}, "policyTypes": ["Ingress"], "ingress": [rule]},
        }

    return [
        policy("between-roles", EVERY_ROLE, everyone),
        policy("clients-to-ingress", labels("ingress"), clients, PORT),
        policy("clients-to-page", labels("management"), clients, PAGE_PORT),
    ]
