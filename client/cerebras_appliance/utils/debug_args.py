"""DebugArgs: read, written and changed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebras_appliance.pb.workflow.appliance.common.common_config_pb2 import DebugArgs
from cerebras_appliance.utils.text_format import parse

__all__ = [
    "DebugArgs",
    "get_debug_args",
    "update_debug_args_from_keys",
    "update_debug_args_with_autogen_policy",
    "update_debug_args_with_mem_limits",
    "write_debug_args",
]

_RESOURCES = {
    "compile_crd_memory_gi": "compile_coord_resource",
    "execute_crd_memory_gi": "execute_coord_resource",
    "wrk_memory_gi": "worker_resource",
    "act_memory_gi": "activation_resource",
    "cmd_memory_gi": "command_resource",
    "wgt_memory_gi": "weight_resource",
}


def write_debug_args(debug_args: DebugArgs, path: str | os.PathLike[str]) -> None:
    """Writes them as text."""
    Path(path).write_text(str(debug_args))


def get_debug_args(value: DebugArgs | str | os.PathLike[str] | None = None) -> DebugArgs:
    """The DebugArgs of a file; itself, if it is a DebugArgs already; empty ones for None.

    Raises:
        OSError: the file cannot be read.
        ConfigurationError: it has another form.
    """
    if isinstance(value, DebugArgs):
        return value
    debug_args = DebugArgs()
    if value:
        parse(Path(value).read_text(), debug_args)
    return debug_args


def update_debug_args_from_keys(debug_args: DebugArgs, flat_dargs: Mapping[str, Any]) -> None:
    """Sets fields: `{"debug_mgr.labels.a": "b"}` means the same as `{"debug_mgr": {"labels": {"a": "b"}}}`."""
    for path, value in flat_dargs.items():
        *parents, name = path.split(".")
        place: Any = debug_args
        for parent in parents:
            place = getattr(place, parent)
        if isinstance(value, Mapping):
            update_debug_args_from_keys(getattr(place, name), value)
        else:
            setattr(place, name, value)


def update_debug_args_with_autogen_policy(debug_args: DebugArgs, autogen_policy: str | None = None) -> None:
    """Notes how the old compiler was to generate kernels."""
    if autogen_policy is not None:
        debug_args.debug_crd.autogen_policy = autogen_policy


def update_debug_args_with_mem_limits(debug_args: DebugArgs, runconfig: Mapping[str, Any] | None = None) -> None:
    """Notes what a run's configuration allows the servers of each kind, as `wgt_memory_gi` in GiB."""
    for name, resource in _RESOURCES.items():
        if (runconfig or {}).get(name) is not None:
            getattr(debug_args.debug_usr, resource).memory_bytes = runconfig[name] << 30  # type: ignore[index]
