"""LazyTensor: what the user holds for a tensor on the Cerebras device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch._ops import OpOverload

from cstorch.errors import TraceError, TraceTypeError
from cstorch.tracing.context import context
from cstorch.tracing.messages import shape_changed, value_read
from cstorch.tracing.tensors.cell import Cell
from cstorch.tracing.tensors.step_value import StepValue

DEVICE = torch.device("lazy")
META = torch.device("meta")

Dispatch: TypeAlias = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]


_gradient: Any = torch._C.TensorBase.__dict__["grad"]


class Base:
    """Stands for the storage of a tensor that has no cell: one made in a traced step, shared with its views, or in the
    body of a loop, where `is_viewed` says that another tensor may share it."""

    __slots__ = ("is_viewed", "written")

    def __init__(self) -> None:
        self.written = False
        self.is_viewed = False


@dataclass(slots=True, eq=False)
class Handle:
    """What a LazyTensor stands for: a meta tensor for shape, strides and type, and where its value comes from.

    `cell` is None for a tensor made in a traced step; then `trace` numbers that trace and `value` the value in it, and
    `recipe` says how a later trace can make it again, if it depends on constants alone. Or `deferred` says how a value
    of a step is computed when the step has run.
    """

    meta: torch.Tensor
    cell: Cell | None = None
    trace: int = 0
    value: int = -1
    base: Base | None = None
    deferred: StepValue | None = None
    recipe: object = None


class LazyTensor(torch.Tensor):
    """A tensor on the device: no bytes, only a handle.

    Outside a traced step, operations run at once on the CPU, on the bytes of the cell. Within one they are recorded.
    """

    # Set when the device is registered.
    _dispatch: ClassVar[Dispatch]  # runs or records one ATen call
    _check_known: ClassVar[Callable[[torch.Tensor], None]]  # raises where the value cannot be read or replaced
    _outside_backward: ClassVar[Callable[[], TraceError]]
    _handle: Handle
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["LazyTensor"], handle: Handle, requires_grad: bool = False) -> "LazyTensor":
        meta = handle.meta
        with torch.inference_mode(False):  # within it a view of a tensor from outside could not be made
            tensor: LazyTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                meta.shape,
                strides=meta.stride(),
                storage_offset=meta.storage_offset(),
                dtype=meta.dtype,
                device=DEVICE,
                requires_grad=requires_grad,
            )
        tensor._handle = handle
        return tensor

    def __init__(self, handle: Handle, requires_grad: bool = False) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls._dispatch(func, args, kwargs or {})

    # What follows is the part of the Python surface that does not reach __torch_dispatch__ by itself.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # Never reads, so that a debugger can show a tensor while the step is traced.
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{DEVICE.type}'{grad})"

    def __str__(self) -> str:
        return repr(self) if context.recorder is None else str(self._known(TraceError))

    def __format__(self, spec: str) -> str:
        if not spec and context.recorder is None:
            return repr(self)
        return format(self.item() if spec else self._known(TraceError), spec)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        value = self.cpu() if context.recorder is None else self._known(TraceTypeError)
        return value.numpy(*args, **kwargs)

    def _known(self, error: type[TraceError]) -> torch.Tensor:
        """The value in a traced step; the error if it is not known."""
        assert context.recorder is not None
        func = torch.ops.aten._to_copy if error is TraceTypeError else torch.ops.aten._local_scalar_dense
        refusal = value_read(func.default, error)
        value = context.recorder.known_value(self, refusal)
        if value is None:
            raise refusal
        return value

    def __array__(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        array = self.detach().numpy()
        return array if dtype is None else array.astype(dtype)

    def data_ptr(self) -> int:
        raise RuntimeError("a tensor on the Cerebras device has no data pointer; use tensor.cpu() outside the step")

    def backward(self, *args: Any, **kwargs: Any) -> None:
        if context.recorder is None and self._handle.deferred is not None:
            raise LazyTensor._outside_backward()
        super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if context.recorder is None:
            LazyTensor._check_known(self)
        if id(self) not in memo:
            with torch.no_grad():
                copy: torch.Tensor = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy: torch.Tensor = self.detach().cpu()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        return copy.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @property
    def grad(self) -> torch.Tensor | None:
        gradient: torch.Tensor | None = _gradient.__get__(self)
        if gradient is None and context.recorder is not None:
            context.recorder.looked_at.add(id(self))
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if context.recorder is not None and _gradient.__get__(self) is None:
            context.recorder.looked_at.add(id(self))
        _gradient.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """`p.data = v`: take over v's storage. (In C++ only the tensor's own metadata would move, not the handle.)"""
        if not isinstance(value, LazyTensor):
            value = value.to(DEVICE)
        assert isinstance(value, LazyTensor)
        if context.recorder is None:
            LazyTensor._check_known(self)
            LazyTensor._check_known(value)
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # shape and type, which are in C++
            self._handle = value._handle
            return
        if value.shape != self.shape or value.dtype != self.dtype:
            raise shape_changed(self, value)
        with torch.no_grad():
            taken = value.detach() if value.stride() == self.stride() else value.detach().contiguous()
        assert isinstance(taken, LazyTensor)
        self._handle = taken._handle


def new_tensor(cell: Cell) -> LazyTensor:
    """A device tensor over the whole of a cell."""
    return LazyTensor(Handle(torch.empty(cell.shape, dtype=cell.dtype, device=META), cell))


def from_cpu(tensor: torch.Tensor) -> LazyTensor:
    """A device tensor with the value of a CPU tensor."""
    cell = Cell(tuple(tensor.shape), tensor.dtype)
    cell.write(tensor)
    return new_tensor(cell)


def cell_of(tensor: torch.Tensor) -> Cell:
    """The cell of a device tensor that has one.

    Raises TypeError for a tensor that is not on the device or was computed in a traced step.
    """
    if not isinstance(tensor, LazyTensor) or tensor._handle.cell is None:
        raise TypeError(f"{tensor!r} is not a tensor that was made on the device outside a traced step")
    return tensor._handle.cell


def is_device(device: Any) -> bool:
    """True for the Cerebras device, with or without an index."""
    return device is not None and torch.device(device).type == DEVICE.type


_META_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)


def follow_meta(tensor: LazyTensor) -> None:
    """Give the wrapper the shape of its meta tensor, after an operation that changed that in place (t_, unsqueeze_)."""
    meta = tensor._handle.meta
    with torch._C._DisableTorchDispatch():
        torch.ops.aten.as_strided_.default.redispatch(
            _META_KEYS, tensor, list(meta.shape), list(meta.stride()), int(meta.storage_offset())
        )
