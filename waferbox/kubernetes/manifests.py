"""All manifests of a cluster on Kubernetes, in the order in which they are to be applied."""

from collections.abc import Mapping, Sequence

import yaml

from waferbox.kubernetes.compose_file import PORT, RoleSettings
from waferbox.kubernetes.pods import (
    APP,
    CLIENTS,
    EVERY_ROLE,
    NAMED_ROLES,
    PAGE_PORT,
    ClusterOptions,
    Manifest,
    labels,
    pod,
)


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
    if role.name in NAMED_ROLES:
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
    opened = {"clients-to-ingress": ("ingress", PORT), "clients-to-page": ("management", PAGE_PORT)}
    return [
        between,
        *(
            network_policy(name, {"matchLabels": labels(role)}, [CLIENTS], options, port)
            for name, (role, port) in opened.items()
        ),
    ]
