"""The fields of a ClusterConfig in files that environment variables name, as on the user nodes of the real system."""

import json
import os
from pathlib import Path
from typing import Any

from cstorch.errors import ConfigurationError

DEFAULTS_VARIABLE = "CEREBRAS_WAFER_SCALE_CLUSTER_DEFAULTS"
USER_NODE_VARIABLE = "CSCONFIG_PATH"
_MAX_BYTES = 1 << 20


def defaults(known: frozenset[str]) -> dict[str, Any]:
    """Returns the fields of the YAML file that CEREBRAS_WAFER_SCALE_CLUSTER_DEFAULTS names; none without it.

    Args:
        known: The names of all fields.

    Raises:
        ConfigurationError: The file cannot be read, or has something else than known fields.
    """
    text = _text(DEFAULTS_VARIABLE)
    if text is None:
        return {}
    import yaml  # only this function needs it

    where = f"the file that {DEFAULTS_VARIABLE} names"
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{where} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{where} must have fields of a ClusterConfig, as in `num_csx: 2`")
    if unknown := sorted(map(str, values.keys() - known)):
        raise ConfigurationError(f"{where} has {unknown[0]!r}, which is no field of a ClusterConfig")
    return values


def user_node_address(namespace: str | None) -> str | None:
    """Returns the management address of the current context in the JSON file that CSCONFIG_PATH names; None without it.

    The real system's own path for that file is not read: that file names a real cluster.

    Args:
        namespace: The namespace; None: the only one.

    Raises:
        ConfigurationError: The file cannot be read or is malformed, or the namespace does not fit.
    """
    text = _text(USER_NODE_VARIABLE)
    if text is None:
        return None
    where = f"the file that {USER_NODE_VARIABLE} names"
    try:
        config = json.loads(text)
        (context,) = [item for item in config["contexts"] if item["name"] == config["currentContext"]]
        (cluster,) = [item for item in config["clusters"] if item["name"] == context["cluster"]]
        namespaces = [item["name"] for item in cluster.get("namespaces", [])]
        server = str(cluster["server"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{where} has no cluster for its current context: {error!r}") from None
    if namespace is None and len(namespaces) > 1:
        raise ConfigurationError(f"{where} has several namespaces: set mgmt_namespace to one of {namespaces}")
    if namespace is not None and namespaces and namespace not in namespaces:
        raise ConfigurationError(f"{where} has no namespace {namespace!r}: set mgmt_namespace to one of {namespaces}")
    return server


def _text(variable: str) -> str | None:
    path = os.environ.get(variable)
    if not path:
        return None
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(_MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the file that {variable} names cannot be read: {error}") from None
