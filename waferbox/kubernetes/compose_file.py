"""The roles of a cluster as docker-compose.yml describes them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from waferbox.host.memory import UNITS
from waferbox.roles import MEMORYX, SWARMX, WAFER, WORKER

PORT: Final = 7000  # at which each role listens
METRICS_PORT: Final = 9100
LISTEN: Final = f"0.0.0.0:{PORT}"  # the --listen argument of each role in the file
CACHE_FOLDER: Final = "/var/lib/waferbox"
OWN_FILE: Final = Path(__file__).with_name("docker-compose.yml")  # in a checkout a link to the file at its root

# Each wafer needs a worker. With a shard and a SwarmX node beside each, the busiest link of a host carries about the
# same bytes for any number of hosts.
FOLLOWERS: Final = frozenset({MEMORYX.name, SWARMX.name, WORKER.name})

_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::-([^}$]*))?\}")
_UNITS: Final = {"b": "", "k": "Ki", "m": "Mi", "g": "Gi"}
_LIMIT: Final = re.compile(r"(\d+)([bkmg])b?", re.IGNORECASE)


class ComposeFileError(ValueError):
    """Raised when the file does not describe a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings:
    """One service of the file: the processes of a role."""

    name: str
    image: str
    arguments: Sequence[str]  # module and options
    count: int  # at least, where it follows the wafers
    follows_wafers: bool  # whether there is one for each wafer, as no number was given
    memory: str  # of one process, as Kubernetes writes it: 8Gi
    memory_bytes: int
    keeps_files: bool  # whether its cache folder outlives a process
    grace_seconds: int  # between the request to end and the kill


def read_roles(path: Path, variables: Mapping[str, str]) -> dict[str, RoleSettings]:
    """Reads the roles of a file, by the names of their services. Services with a profile are left out.

    Args:
        path: the file.
        variables: replace `${NAME:-default}` in the file.

    Raises:
        ComposeFileError: the file does not describe a cluster.
        OSError: the file cannot be read.
    """
    try:
        content = yaml.safe_load(_filled_in(path.read_text(), variables))
        services = content["services"]
        return {name: _role(name, service) for name, service in services.items() if not service.get("profiles")}
    except (yaml.YAMLError, UnicodeError, KeyError, TypeError, AttributeError) as error:
        raise ComposeFileError(f"{path} does not describe a cluster, as docker-compose.yml does: {error}") from error


def with_counts(roles: Mapping[str, RoleSettings]) -> dict[str, RoleSettings]:
    """Returns the roles with their numbers, of which some follow that of the wafers."""
    wafers = roles[WAFER.name].count if WAFER.name in roles else 0
    return {
        name: replace(role, count=max(role.count, wafers)) if role.follows_wafers else role
        for name, role in roles.items()
    }


def _filled_in(text: str, variables: Mapping[str, str]) -> str:
    """The text with the values of variables, which may be nested: the innermost are replaced first."""
    before = ""
    while text != before:
        before = text
        text = _VARIABLE.sub(lambda match: variables.get(match[1]) or match[2] or "", text)
    return text


def _role(name: str, service: Mapping[str, Any]) -> RoleSettings:
    arguments = [str(word) for word in service["command"]]
    if LISTEN not in arguments:
        raise ComposeFileError(f"{name} must listen at {LISTEN}")
    limit = _LIMIT.fullmatch(str(service["mem_limit"]))
    if limit is None:
        raise ComposeFileError(f"the mem_limit of {name} is {service['mem_limit']!r}: write it as 8g or 512m")
    return RoleSettings(
        name=name,
        image=str(service["image"]),
        arguments=arguments,
        count=int(service.get("scale", 1)),
        follows_wafers=name in FOLLOWERS,
        memory=f"{limit[1]}{_UNITS[limit[2].lower()]}",
        memory_bytes=int(limit[1]) * UNITS[limit[2].lower().removeprefix("b")],
        keeps_files=any(str(volume).endswith(f":{CACHE_FOLDER}") for volume in service["volumes"]),
        grace_seconds=int(str(service["stop_grace_period"]).removesuffix("s")),
    )
