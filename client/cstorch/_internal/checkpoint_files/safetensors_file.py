"""Reads a safetensors file: a flat dict of tensors, each of which is read at its use."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from cstorch._internal.checkpoint_files.deferred import Unchanged
from cstorch.errors import CheckpointError

_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The source of a tensor in a safetensors file."""

    file: Unchanged
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self) -> torch.Tensor:
        with safe_open(self.file.check(), framework="pt") as file:
            value: torch.Tensor = file.get_tensor(self.name)
        return value


def is_safetensors(path: Path) -> bool:
    """Whether a file begins like a safetensors file: with the length of a JSON object, and the object."""
    with path.open("rb") as file:
        start = file.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size - 8


def read_safetensors(path: Path) -> dict[str, Entry]:
    """Returns the sources of the tensors, by name.

    Raises:
        CheckpointError: The file is damaged, or has a type that is not supported.
    """
    now = Unchanged.now(path)
    entries: list[Entry] = []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                described = file.get_slice(name)
                kind = described.get_dtype()
                if kind not in _TYPES:
                    raise CheckpointError(f"{path} holds {name!r} of type {kind}, which is not loaded")
                entries.append(Entry(file=now, name=name, shape=tuple(described.get_shape()), dtype=_TYPES[kind]))
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: it is truncated or damaged ({error})") from None
    return {entry.name: entry for entry in entries}
