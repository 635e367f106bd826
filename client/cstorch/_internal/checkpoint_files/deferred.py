"""DeferredTensor: a tensor of a checkpoint, whose bytes are read at its use."""

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
    """A loaded file, with its status at that time."""

    path: Path
    status: tuple[int, int, int]

    @staticmethod
    def now(path: Path) -> "Unchanged":
        return Unchanged(path, _status(path))

    def check(self) -> Path:
        """Returns the path of the file.

        Raises:
            CheckpointError: The file was removed or has changed.
        """
        if not self.path.exists():
            raise CheckpointError(f"{self.path} was removed before all tensors that were loaded from it had been read")
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
    """Maps bytes of a file into memory for as long as there are references. Writes do not change the file."""
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), offset - start + nbytes, offset=start, access=mmap.ACCESS_COPY)
    return memoryview(mapped)[offset - start :]


class Source(Protocol):
    """The source of a deferred tensor's value."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def view(self) -> torch.Tensor:
        """Returns the value, which may be a view of the file: a caller may neither keep it nor write to it.

        Raises:
            CheckpointError: The file has changed or is damaged.
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
    """The value of a deferred tensor and of all tensors detached from it.

    Args:
        source: The source of the value.
        keeps: Whether a value that was read stays in memory.
    """

    def __init__(self, source: Source, *, keeps: bool) -> None:
        self.source = source
        self._keeps = keeps
        self._value: torch.Tensor | None = None

    @property
    def is_read(self) -> bool:
        """Whether the value is in memory, where it may have been changed."""
        return self._value is not None

    def read(self) -> torch.Tensor:
        """Returns the value; a caller may neither keep it nor write to it."""
        return self.hold() if self._keeps or self.is_read else self.source.view()

    def hold(self) -> torch.Tensor:
        """Returns the value, which stays in memory from now on."""
        if self._value is None:
            self._value = self.source.view().clone(memory_format=torch.contiguous_format)
        return self._value


class DeferredTensor(torch.Tensor):
    """A CPU tensor with shape and type, whose bytes each operation reads and discards.

    The bytes stay in memory if the tensor was loaded with map_location="cache", and after the first operation that
    writes to the tensor or makes a view of it.
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
        # The result of an in-place operation is the deferred tensor itself, not its value.
        return pytree.tree_map(lambda one: next((tensor for tensor, value in held if value is one), one), out)

    # --- Methods that do not reach __torch_dispatch__ by themselves ---------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As torch.Tensor.to, but never returns the deferred tensor itself: the result does not depend on the file."""
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
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> torch.Tensor:
        """Returns a plain tensor, or parameter, with the present value."""
        value = self._content.read().clone(memory_format=torch.contiguous_format)
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(value, self.requires_grad)
        return value.requires_grad_() if self.requires_grad else value


def _values(argument: Any, held: list[tuple[DeferredTensor, torch.Tensor]] | None) -> Any:
    """Returns an argument with values instead of deferred tensors; those in `held` stay in memory."""
    if isinstance(argument, DeferredTensor):
        if held is None:
            return argument._content.read()
        held.append((argument, argument._content.hold()))
        return held[-1][1]
    if isinstance(argument, list | tuple):
        return [_values(item, held) for item in argument]
    return argument


def content_of(tensor: torch.Tensor) -> Content | None:
    """Returns the content of a deferred tensor; None for any other tensor."""
    return tensor._content if isinstance(tensor, DeferredTensor) else None
