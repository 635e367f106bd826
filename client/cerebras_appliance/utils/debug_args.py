"""DebugArgs: read from text, written and changed."""

import ast
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebras_appliance.pb.workflow.appliance.common.common_config_pb2 import DebugArgs
from cstorch.backends.open_settings import OpenSettings
from cstorch.errors import ConfigurationError

# --- The text form of protocol messages, read without their definition ------------------------------------------------


_TOKEN = re.compile(r"""\s+|\#[^\n]*|(?P<token>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[\w.+-]+|[{}<>:\[\],;])""")
_CLOSING = {"{": "}", "<": ">"}


def parse_settings(text: str, settings: OpenSettings) -> None:
    """Adds the settings of a text to a tree.

    Args:
        text: The text form of a protocol message.
        settings: The tree.

    Raises:
        ConfigurationError: The text has another form.
    """
    tokens = _tokens(text)
    try:
        _parse_fields(tokens, settings, None)
    except IndexError:
        raise ConfigurationError("a file of debug_args ends within a message: a closing brace is missing") from None


def _tokens(text: str) -> list[str]:
    """The tokens, the first one last."""
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            line = text.count("\n", 0, position) + 1
            raise ConfigurationError(f"a file of debug_args is no text of a message: line {line}, {text[position]!r}")
        if match["token"]:
            tokens.append(match["token"])
        position = match.end()
    return tokens[::-1]


def _parse_fields(tokens: list[str], settings: OpenSettings, end: str | None) -> None:
    while tokens or end:
        name = tokens.pop()
        if name == end:
            return
        if not re.fullmatch(r"\w+", name):
            raise ConfigurationError(f"a file of debug_args has {name!r} where the name of a field must be")
        if tokens[-1] == ":":
            tokens.pop()
        for value in _values(tokens):
            _set(settings, name, value)
        if tokens and tokens[-1] in (",", ";"):
            tokens.pop()


def _values(tokens: list[str]) -> list[Any]:
    if tokens[-1] != "[":
        return [_value(tokens)]
    tokens.pop()
    values = []
    while tokens[-1] != "]":
        values.append(_value(tokens))
        if tokens[-1] == ",":
            tokens.pop()
    tokens.pop()
    return values


def _value(tokens: list[str]) -> Any:
    token = tokens.pop()
    if token in _CLOSING:
        inner = OpenSettings()
        _parse_fields(tokens, inner, _CLOSING[token])
        return inner
    if token in ("true", "false"):
        return token == "true"
    try:
        return ast.literal_eval(token)
    except (SyntaxError, ValueError):
        return token  # the name of an enumeration's value


def _set(settings: OpenSettings, name: str, value: Any) -> None:
    """Sets a field; an entry of a map by its key, and of a list behind the others."""
    if isinstance(value, OpenSettings) and set(value.keys()) == {"key", "value"}:
        settings[name][value.key] = value.value
    elif settings.HasField(name):
        before = settings.get(name)
        if not (isinstance(before, OpenSettings) and not before.keys()):
            settings.ClearField(name)
            getattr(settings, name).append(before)
        getattr(settings, name).append(value)
    else:
        setattr(settings, name, value)


# --- DebugArgs: read, written and changed -----------------------------------------------------------------------------


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
    """Writes settings as text.

    Args:
        debug_args: The settings.
        path: The file.
    """
    Path(path).write_text(str(debug_args))


def get_debug_args(value: DebugArgs | str | os.PathLike[str] | None = None) -> DebugArgs:
    """Returns the DebugArgs of a file.

    Args:
        value: The file; a DebugArgs, which is returned; None: empty ones.

    Raises:
        OSError: The file cannot be read.
        ConfigurationError: The file has another form.
    """
    if isinstance(value, DebugArgs):
        return value
    debug_args = DebugArgs()
    if value:
        parse_settings(Path(value).read_text(), debug_args)
    return debug_args


def update_debug_args_from_keys(debug_args: DebugArgs, flat_dargs: Mapping[str, Any]) -> None:
    """Sets fields by their paths.

    Args:
        debug_args: The settings.
        flat_dargs: `{"debug_mgr.labels.a": "b"}`, or the same as `{"debug_mgr": {"labels": {"a": "b"}}}`.
    """
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
    """Notes how the old compiler was to generate kernels.

    Args:
        debug_args: The settings.
        autogen_policy: The policy; None: nothing is noted.
    """
    if autogen_policy is not None:
        debug_args.debug_crd.autogen_policy = autogen_policy


def update_debug_args_with_mem_limits(debug_args: DebugArgs, runconfig: Mapping[str, Any] | None = None) -> None:
    """Notes the memory limits of the servers of each kind.

    Args:
        debug_args: The settings.
        runconfig: The limits, as `wgt_memory_gi` in GiB; None: none.
    """
    for name, resource in _RESOURCES.items():
        if (runconfig or {}).get(name) is not None:
            getattr(debug_args.debug_usr, resource).memory_bytes = runconfig[name] << 30  # type: ignore[index]
