"""Settings of the real system's compiler and management, which scripts set by any name. No number depends on them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_INDENT = "  "


class OpenSettings:
    """A tree of settings that takes any name, however deep, as a protocol message, a map or a list would.

    `settings.a.b = 1`, `settings.a["b"] = 1` and `settings.a.items.add(b=1)` all work, also on names that were never
    set. A name that was never set is false, has length 0, and adds nothing to a value.

    Args:
        **fields: The first settings.
    """

    def __init__(self, **fields: Any) -> None:
        self._fields: dict[str, Any] = {}
        self._elements: list[Any] = []
        self._is_map = False
        for name, value in fields.items():
            setattr(self, name, value)

    # As a message.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle look such names up
            raise AttributeError(name)
        return self._fields.setdefault(name, OpenSettings())

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self._fields[name] = _kept(value)

    def __delattr__(self, name: str) -> None:
        self.ClearField(name)

    def HasField(self, name: str) -> bool:
        """Whether the name is set.

        Args:
            name: The name of the setting.
        """
        return name in self._set_fields()

    def ClearField(self, name: str) -> None:
        """Removes a setting.

        Args:
            name: The name of the setting.
        """
        self._fields.pop(name, None)

    def Clear(self) -> None:
        """Removes all settings."""
        self._fields.clear()
        self._elements.clear()

    def MergeFrom(self, other: "OpenSettings") -> None:
        """Sets all that is set in another tree, and appends its lists.

        Args:
            other: The other tree.

        Raises:
            TypeError: `other` is no such tree.
        """
        if not isinstance(other, OpenSettings):
            raise TypeError(f"settings are merged from settings, not from a {type(other).__name__}")
        self._is_map |= other._is_map
        for name, value in other._set_fields().items():
            if isinstance(value, OpenSettings):
                mine = self._fields.get(name)
                if not isinstance(mine, OpenSettings):
                    mine = self._fields[name] = OpenSettings()
                mine.MergeFrom(value)
            else:
                self._fields[name] = value
        self.extend(other._elements)

    def CopyFrom(self, other: "OpenSettings") -> None:
        """Makes the tree equal to another.

        Args:
            other: The other tree.

        Raises:
            TypeError: `other` is no such tree.
        """
        if other is not self:
            self.Clear()
            self.MergeFrom(other)

    # As a map.

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int):
            return self._elements[key]
        self._is_map = True
        return self._fields.setdefault(key, OpenSettings())

    def __setitem__(self, key: str | int, value: Any) -> None:
        if isinstance(key, int):
            self._elements[key] = _kept(value)
            return
        self._is_map = True
        self._fields[key] = _kept(value)

    def __delitem__(self, key: str) -> None:
        del self._fields[key]

    def __contains__(self, key: object) -> bool:
        return key in self._set_fields() or key in self._elements

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a setting, or the default.

        Args:
            key: The name of the setting.
            default: The value if it is not set.
        """
        return self._set_fields().get(key, default)

    def pop(self, key: str, default: Any = None) -> Any:
        """Removes a setting and returns it, or the default.

        Args:
            key: The name of the setting.
            default: The value if it is not set.
        """
        return self._fields.pop(key, default)

    def keys(self) -> list[str]:
        """Returns the names that are set."""
        return list(self._set_fields())

    def items(self) -> list[tuple[str, Any]]:
        """Returns the names that are set, with their values."""
        return list(self._set_fields().items())

    def update(self, values: Mapping[str, Any]) -> None:
        """Sets all items of a mapping.

        Args:
            values: The mapping.
        """
        for key, value in values.items():
            self[key] = value

    # As a list.

    def append(self, value: Any) -> None:
        """Appends an element.

        Args:
            value: The element.
        """
        self._elements.append(_kept(value))

    def extend(self, values: Any) -> None:
        """Appends elements.

        Args:
            values: The elements.
        """
        self._elements.extend(map(_kept, values))

    def add(self, **fields: Any) -> "OpenSettings":
        """Appends an element that is a tree itself, and returns it.

        Args:
            **fields: The settings of the new tree.
        """
        self._elements.append(element := OpenSettings(**fields))
        return element

    # As a value.

    def __iter__(self) -> Iterator[Any]:
        return iter(self._elements or self.keys())

    def __len__(self) -> int:
        return len(self._set_fields()) + len(self._elements)

    def __add__(self, other: Any) -> Any:
        return NotImplemented if self else other

    __radd__ = __add__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpenSettings):
            return NotImplemented
        return self._set_fields() == other._set_fields() and self._elements == other._elements

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._set_fields()!r})"

    def _set_fields(self) -> dict[str, Any]:
        return {
            name: value for name, value in self._fields.items() if not isinstance(value, OpenSettings) or len(value)
        }

    def _lines(self) -> Iterator[str]:
        """Yields the lines of the text form of protocol messages."""
        for name, value in self._set_fields().items():
            if not isinstance(value, OpenSettings):
                yield f"{name}: {_text_of(value)}"
            elif value._elements:
                for element in value._elements:
                    yield from _block(name, element)
            elif value._is_map:
                for key, entry in value._set_fields().items():
                    yield from _block(name, OpenSettings(key=key, value=entry))
            else:
                yield from _block(name, value)


def _block(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, OpenSettings):
        yield f"{name}: {_text_of(value)}"
        return
    yield f"{name} {{"
    yield from (_INDENT + line for line in value._lines())
    yield "}"


def _text_of(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str | bool) else str(value)


def _kept(value: Any) -> Any:
    if isinstance(value, Mapping):
        tree = OpenSettings()
        tree.update(value)
        return tree
    if isinstance(value, list | tuple):
        tree = OpenSettings()
        tree.extend(value)
        return tree
    return value
