"""Malformed messages: built from the descriptors of services, or bytes that are no message."""

import importlib
import pkgutil
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

import wsc.v1
from waferbox.links.frame import Frame, FrameKind

MAX_DEPTH = 4
EXTREMES = (0, 1, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def methods() -> Mapping[str, MethodDescriptor]:
    """Those of all services, by path."""
    modules = [importlib.import_module(f"wsc.v1.{module.name}") for module in pkgutil.iter_modules(wsc.v1.__path__)]
    services = [
        service
        for module in modules
        if module.__name__.endswith("_pb2")
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


class Malformed:
    """Draws messages. Not thread-safe."""

    def __init__(self, seed: object, names: Sequence[str] = ()) -> None:
        """names: of jobs, members and addresses that exist; messages bear them with something changed."""
        self._random = random.Random(repr(seed))
        self._names = names

    def message(self, method: MethodDescriptor) -> bytes:
        """For a method: of its type with values that make no sense, damaged, or bytes of any kind."""
        draw = self._random.random()
        if draw < 0.1:
            return self._random.randbytes(self._random.choice((0, 1, 10, 1000, 50_000)))
        if draw < 0.15:
            return self._nested(self._random.randrange(1, 300))
        content = self._build(GetMessageClass(method.input_type)(), 0).SerializeToString()
        if draw < 0.5:
            return content
        return self.damaged(content)

    def frame(self) -> bytes:
        """For a link, as one packet."""
        generator = self._random
        payload = generator.randbytes(generator.choice((0, 1, 64, 1000)))
        sizes = [generator.choice((*EXTREMES, generator.randrange(2**20))) % 2**32 for _ in range(2)]
        longs = [generator.choice((*EXTREMES, generator.randrange(2**20))) % 2**64 for _ in range(4)]
        kind = generator.choice(list(FrameKind))
        frame = Frame(kind, *sizes, *longs)
        if generator.random() < 0.5:
            frame = frame._replace(length=len(payload), total=len(payload))
        content = frame.header(payload) + payload
        return content if generator.random() < 0.5 else self.damaged(content)

    def damaged(self, content: bytes) -> bytes:
        """Cut, changed, or with something in it that says that it is longer than it is."""
        generator = self._random
        damaged = bytearray(content)
        match generator.randrange(3):
            case 0:
                return content[: generator.randrange(len(content) + 1)]
            case 1:
                for _ in range(generator.randrange(1, 5)):
                    if damaged:
                        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
            case _:
                place = generator.randrange(len(damaged) + 1)
                tag = generator.randrange(1, 16) << 3 | 2
                damaged[place:place] = bytes([tag]) + generator.choice((b"\xff\xff\xff\x7f", b"\xff" * 9 + b"\x01"))
        return bytes(damaged)

    def _nested(self, depth: int) -> bytes:
        content, tag = b"", self._random.randrange(1, 16) << 3 | 2
        for _ in range(depth):
            content = bytes([tag]) + _varint(len(content)) + content
        return content

    def _build(self, message: Message, depth: int) -> Message:
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < 0.6:
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        count = self._random.choice((0, 1, 3, 100 if depth == 0 else 2))
        if is_map:
            key, value = field.message_type.fields
            for _ in range(count):
                entry = getattr(message, field.name)
                if value.message_type is not None:
                    self._build(entry[self._value(key)], depth + 1)
                else:
                    entry[self._value(key)] = self._value(value)
        elif field.message_type is not None:
            if depth < MAX_DEPTH:
                target = getattr(message, field.name)
                if field.is_repeated:
                    for _ in range(count):
                        self._build(target.add(), depth + 1)
                else:
                    target.SetInParent()
                    self._build(target, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(self._value(field) for _ in range(count))
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        generator = self._random
        makers: Mapping[int, Callable[[], Any]] = {
            FieldDescriptor.CPPTYPE_BOOL: lambda: generator.random() < 0.5,
            FieldDescriptor.CPPTYPE_FLOAT: self._number,
            FieldDescriptor.CPPTYPE_DOUBLE: self._number,
            FieldDescriptor.CPPTYPE_STRING: self._content if field.type == FieldDescriptor.TYPE_BYTES else self._text,
        }
        if field.cpp_type in makers:
            return makers[field.cpp_type]()
        least, most = RANGES[field.cpp_type]
        value = generator.choice((*EXTREMES, generator.randrange(100)))
        return min(max(value, least), most)

    def _number(self) -> float:
        return self._random.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))

    def _content(self) -> bytes:
        return self._random.randbytes(self._random.choice((0, 3, 100, 10_000)))

    def _text(self) -> str:
        generator = self._random
        if self._names and generator.random() < 0.4:
            name = generator.choice(self._names)
            return name[:-1] + chr(generator.randrange(33, 127)) + "x"
        return generator.choice(("", "a", "é" * 10, "../" * 20, "%s%n", "x" * 10_000, "\0", "127.0.0.1:1"))


def _varint(value: int) -> bytes:
    content = bytearray()
    while value > 127:
        content.append(value & 127 | 128)
        value >>= 7
    content.append(value)
    return bytes(content)
