"""`waferbox kubernetes`: the manifests of a cluster on Kubernetes, or its Helm chart."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Annotated, Final

import typer

from waferbox.commands.cluster_size import warn_of_few_workers
from waferbox.output.console import fail, print_text
from waferbox.roles import WAFER, WORKER

# Names of Kubernetes, by RFC 1123: those of namespaces are labels, others consist of labels between dots.
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_MOST_OF_LABEL: Final = 63
_MOST_OF_NAME: Final = 253
_LABEL_RULE: Final = f"at most {_MOST_OF_LABEL} small letters, digits and dashes, no dash at an end"
_NAME_RULE: Final = f"at most {_MOST_OF_NAME} small letters, digits, dashes and dots, none of the last two at an end"
_SIZE: Final = re.compile(r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?")
_TAG: Final = re.compile(r"\w[\w.-]{0,127}", re.ASCII)


def kubernetes(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help=r"The roles, with the number and size of each.  \[default: Waferbox's docker-compose.yml]",
            dir_okay=False,
        ),
    ] = None,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=N",
            help=r"Processes of a role.  \[default: the file's number; of memoryx, swarmx and worker at least "
            "as many as wafers]",
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of all objects.")] = "waferbox",
    images: Annotated[str, typer.Option(metavar="PREFIX", help="Prefix of the images: registry.example/me/")] = "",
    tag: Annotated[str, typer.Option(help="Tag of the images.")] = "latest",
    tls: Annotated[bool, typer.Option("--tls", metavar="", help="Encrypt, with the certificates of a secret.")] = False,
    storage: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of each volume for caches and recovery points.")
    ] = "20Gi",
    storage_class: Annotated[str, typer.Option(help=r"Class of these volumes.  \[default: the cluster's]")] = "",
    data: Annotated[
        str, typer.Option(metavar="CLAIM:FOLDER", help="A volume that input functions read, and its path there.")
    ] = "",
    ray: Annotated[
        bool, typer.Option("--ray", metavar="", help="A cluster on Ray, as a RayCluster for the KubeRay operator.")
    ] = False,
    wafer_cpus: Annotated[int, typer.Option(min=1, metavar="N", help="With --ray, processors of each wafer.")] = 4,
    chart: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write a Helm chart instead, whose values have these options as defaults, and no namespace.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Print the manifests of a cluster, for `kubectl apply -f -`."""
    from waferbox.kubernetes.chart import write_chart
    from waferbox.kubernetes.compose_file import OWN_FILE, ComposeFileError, read_roles, with_counts
    from waferbox.kubernetes.manifests import ClusterOptions, as_text, cluster_manifests
    from waferbox.kubernetes.ray_cluster import ray_manifests

    if ray and chart:
        raise typer.BadParameter("--chart: there is no chart of a cluster on Ray; leave out --ray or --chart")
    file = file or OWN_FILE
    claim, _, folder = data.partition(":")
    if data and not (claim and folder.startswith("/")):
        raise typer.BadParameter(f"--data: {data!r} must look like CLAIM:/FOLDER")
    if len(namespace) > _MOST_OF_LABEL or not _LABEL.fullmatch(namespace):
        raise typer.BadParameter(f"--namespace: {namespace!r} is no name for Kubernetes: {_LABEL_RULE}")
    for option, name in (("--data", claim), ("--storage-class", storage_class)):
        if name and (len(name) > _MOST_OF_NAME or not all(map(_LABEL.fullmatch, name.split(".")))):
            raise typer.BadParameter(f"{option}: {name!r} is no name for Kubernetes: {_NAME_RULE}")
    if not _SIZE.fullmatch(storage):
        raise typer.BadParameter(f"--storage: {storage!r} is no size for Kubernetes, such as 20Gi or 500M")
    if not _TAG.fullmatch(tag):
        raise typer.BadParameter(f"--tag: {tag!r} is no tag of an image: letters, digits, dots, dashes, underscores")
    options = ClusterOptions(
        namespace=namespace,
        images=images,
        tag=tag,
        tls=tls,
        storage=storage,
        storage_class=storage_class,
        data_claim=claim,
        data_folder=folder,
    )
    try:
        roles = read_roles(file, os.environ)
    except ComposeFileError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{file} cannot be read ({error.strerror}): leave it out, or name a file like docker-compose.yml")
    for each in scale or ():
        name, _, count = each.partition("=")
        if name not in roles or not count.isdecimal():
            raise typer.BadParameter(f"--scale: {each!r} must look like ROLE=N; the roles are {', '.join(roles)}")
        roles[name] = dataclasses.replace(roles[name], count=int(count), follows_wafers=False)
    counted = with_counts(roles)
    if WAFER.name in roles and WORKER.name in roles:
        warn_of_few_workers(counted[WAFER.name].count, counted[WORKER.name].count, f"--scale {WORKER.name}=")
    if chart:
        try:
            write_chart(chart, roles, options)
        except OSError as error:
            fail(f"the chart cannot be written: {error}")
        return
    try:
        made = ray_manifests(counted, options, wafer_cpus) if ray else cluster_manifests(counted, options)
    except ComposeFileError as error:
        fail(str(error))
    print_text(as_text(made).rstrip())
