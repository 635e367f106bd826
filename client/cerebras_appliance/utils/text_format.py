"""The text form of protocol messages, read without their definition."""

import ast
import re
from typing import Any

from cstorch.backends.open_settings import OpenSettings
from cstorch.errors import ConfigurationError

_TOKEN = re.compile(r"""\s+|\#[^\n]*|(?P<token>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[\w.+-]+|[{}<>:\[\],;])""")
_CLOSING = {"{": "}", "<": ">"}


def parse(text: str, settings: OpenSettings) -> None:
    """Adds what a text says to settings.

    Raises:
        ConfigurationError: it is no such text.
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
