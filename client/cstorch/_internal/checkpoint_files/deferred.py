"""DeferredTensor: a tensor of a checkpoint, whose bytes are read when something uses them."""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from cstorch.errors import CheckpointError

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Unchanged:
    """A file as it was when it was loaded."""

    path: Path
    status: tuple[int, int, int]

    @staticmethod
    def now(path: Path) -> "Unchanged":
        return Unchanged(path, _status(path))

    def check(self) -> Path:
        """The file's path.

        Raises:
            CheckpointError: the file is gone, or another one.
        """
        if not self.path.exists():
            raise CheckpointError(f"{self.path} is gone, and not all tensors that were loaded from it had been read")
        if _status(self.path) != self.status:
            raise CheckpointError(
                f"{self.path} has changed since it was loaded, and not all its tensors had been read. Load it again, "
                "or load it with map_location='cpu', which reads everything at once"
            )
        return self.path


def _status(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def map_file(path: Path, offset: int, nbytes: int) -> memoryview:
    """Bytes of a file, mapped into memory as long as something refers to them. What is written there stays here."""
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), offset - start + nbytes, offset=start, access=mmap.ACCESS_COPY)
    return memoryview(mapped)[offset - start :]


class Source(Protocol):
    """Where the value of a deferred tensor comes from."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def view(self) -> torch.Tensor:
        """The value, maybe as a view of the file: to be used now, and neither kept nor written to.

        Raises:
            CheckpointError: the file has changed or is damaged.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """The source of a tensor of one value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: bool | int | float

    def view(self) -> torch.Tensor:
        return torch.full((), self.value, dtype=self.dtype, device="cpu").expand(self.shape)


class Content:
    """The value of a deferred tensor and of all that are detached from it."""

    def __init__(self, source: Source, *, keeps: bool) -> None:
        """keeps: whether what has been read stays in memory."""
        self.source = source
        self._keeps = keeps
        self._value: torch.Tensor | None = None

    @property
    def is_read(self) -> bool:
        """True if the value is in memory; it may have been changed there."""
        return self._value is not None

    def read(self) -> torch.Tensor:
        """The value, which is to be used now, and neither kept nor written to."""
        return self.hold() if self._keeps or self.is_read else self.source.view()

    def hold(self) -> torch.Tensor:
        """The value, which stays in memory from now on."""
        if self._value is None:
            self._value = self.source.view().clone(memory_format=torch.contiguous_format)
        return self._value


class DeferredTensor(torch.Tensor):
    """A CPU tensor that knows its shape and type; each operation reads the bytes, and drops them when it is done.

    They stay in memory if the tensor was loaded with map_location="cache", and from the first operation on that writes
    to the tensor or makes a view of it.
    """

    _content: Content
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["DeferredTensor"], content: Content) -> "DeferredTensor":
        shape, dtype = content.source.shape, content.source.dtype
        tensor: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device("cpu")
        )
        tensor._content = content
        return tensor

    def __init__(self, content: Content) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten.detach.default:
            return DeferredTensor(args[0]._content)
        held: list[tuple[DeferredTensor, torch.Tensor]] = []
        given: list[Any] = []
        named: Mapping[str, Any] = kwargs or {}
        aliased = {argument.name for argument in func._schema.arguments if argument.alias_info is not None}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            given.append(_values(value, held if argument.name in aliased else None))
        out = func(*given, **{name: _values(value, held if name in aliased else None) for name, value in named.items()})
        # What is written in place is the deferred tensor itself, not its value.
        return pytree.tree_map(lambda one: next((tensor for tensor, value in held if value is one), one), out)

    # What follows is the part of the Python surface that does not reach __torch_dispatch__ by itself.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As of every tensor, but never the deferred tensor itself: what it gives does not need the file any more."""
        moved: torch.Tensor = super().to(*args, **kwargs)
        return moved.clone(memory_format=torch.contiguous_format) if moved is self else moved

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.to("cpu", *args, **kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self._content.hold().requires_grad_(self.requires_grad).numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self._content.read().tolist()

    def __array__(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        array = self.detach().numpy()
        return array if dtype is None else array.astype(dtype)

    def data_ptr(self) -> int:
        return self._content.hold().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._content.hold().untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _plain(self) -> torch.Tensor:
        """An ordinary tensor of this kind, with the value now."""
        value = self._content.read().clone(memory_format=torch.contiguous_format)
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(value, self.requires_grad)
        return value.requires_grad_() if self.requires_grad else value


def _values(argument: Any, held: list[tuple[DeferredTensor, torch.Tensor]] | None) -> Any:
    """The argument with values for deferred tensors; they stay in memory if there is a list, which gets each pair."""
    if isinstance(argument, DeferredTensor):
        if held is None:
            return argument._content.read()
        held.append((argument, argument._content.hold()))
        return held[-1][1]
    if isinstance(argument, list | tuple):
        return [_values(item, held) for item in argument]
    return argument


def content_of(tensor: torch.Tensor) -> Content | None:
    """What a deferred tensor holds; None for any other tensor."""
    return tensor._content if isinstance(tensor, DeferredTensor) else None
