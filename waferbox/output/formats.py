"""`-o`: what a command shows, as a table for people or as data for programs."""

import enum
import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
import yaml
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from waferbox.output.console import say

_WIDE_INTEGERS: Final = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


class Format(enum.StrEnum):
    """A format of what is shown."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """Whether it is for programs."""
        return self in (Format.JSON, Format.YAML)


FormatOption = Annotated[Format, typer.Option("-o", "--output", help="Format; wide: more columns, none folded.")]


def print_data(data: Message | Mapping[str, Any], form: Format) -> None:
    """Print it as JSON or YAML, with the names of the protocol and every field."""
    shown = as_data(data) if isinstance(data, Message) else data
    if form == Format.JSON:
        say(json.dumps(shown, indent=2))
    else:
        say(yaml.safe_dump(shown, sort_keys=False).rstrip("\n"))


def as_data(message: Message) -> dict[str, Any]:
    """The message as dictionaries, lists, strings and numbers."""
    data = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _restore_integers(data, message.DESCRIPTOR)
    return data


def _restore_integers(data: dict[str, Any], descriptor: Any) -> None:
    """JSON of protobuf has integers of 64 bits as strings. Ours are counts, which scripts want to compare."""
    for field in descriptor.fields:
        value = data.get(field.name)
        if field.cpp_type in _WIDE_INTEGERS and isinstance(value, str):
            data[field.name] = int(value)
        elif field.message_type is not None:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, dict):
                    _restore_integers(part, field.message_type)
