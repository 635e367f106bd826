"""LazyTensor: a tensor on the device as the script has it. Its value is in a Cell, or is a StepValue of a step."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeAlias, cast

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.context import context, refuse
from cstorch._internal.tracing.messages import shape_changed, subclass, text_read, value_read
from cstorch._internal.tracing.provenance import is_of_package, user_line
from cstorch.errors import TraceError, TraceTypeError

# A tensor of the batch by its position, or a tensor of the trace, or a whole state.
Source = int | torch.Tensor


@dataclass(slots=True, eq=False, kw_only=True)
class StepValue:
    """A value of one step, known when the step has run.

    step: The number of the step.
    source: The tensor of the step that has the value; None for a result of `call`.
    call: Function, arguments and keyword arguments, with StepValues among them.
    value: The value, once it is known; a tuple for a call that returns several tensors.
    """

    step: int
    source: Source | None = None
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
    value: Any = None

    def sources(self) -> Iterator["StepValue"]:
        """Yields the unknown values of sources that this value is computed from."""
        if self.value is not None:
            return
        if self.source is not None:
            yield self
        if self.call is not None:
            for item in pytree.tree_leaves(self.call[1:]):
                if isinstance(item, StepValue):
                    yield from item.sources()

    def evaluate(self, given: Callable[[Source], torch.Tensor]) -> Any:
        """Returns the value; computes it on the CPU if it is not known.

        Args:
            given: Returns the value of a source.
        """
        if self.value is None:
            if self.source is not None:
                self.value = given(self.source)
            else:
                assert self.call is not None
                function, args, kwargs = self.call
                args, kwargs = pytree.tree_map(lambda item: _on_cpu(item, given), (args, kwargs))
                with torch.no_grad():
                    self.value = function(*args, **kwargs)
                self.call = None
        return self.value

    def replay(self, inputs: Mapping[int, torch.Tensor]) -> Any:
        """Returns the same expression of other tensors of the batch, given by their positions."""
        if isinstance(self.source, int):
            return inputs[self.source]
        if self.value is not None:
            return self.value.to("lazy")
        assert self.call is not None
        function, args, kwargs = self.call
        args, kwargs = pytree.tree_map_only(StepValue, lambda item: item.replay(inputs), (args, kwargs))
        return function(*args, **kwargs)

    def is_like(self, other: "StepValue") -> bool:
        """Whether a value of another step is the same expression of the same tensors of the batch."""
        if self.call is None or other.call is None:
            return self.call is other.call and self.source is not None and self.source == other.source
        (function, *mine), (other_function, *theirs) = self.call, other.call
        leaves, structure = pytree.tree_flatten(mine)
        other_leaves, other_structure = pytree.tree_flatten(theirs)
        return function is other_function and structure == other_structure and all(map(_is_like, leaves, other_leaves))


def _on_cpu(item: Any, given: Callable[[Source], torch.Tensor]) -> Any:
    if isinstance(item, StepValue):
        return item.evaluate(given)
    return torch.device("cpu") if isinstance(item, torch.device) else item


def _is_like(one: Any, other: Any) -> bool:
    if isinstance(one, StepValue):
        return isinstance(other, StepValue) and one.is_like(other)
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


# --- LazyTensor -------------------------------------------------------------------------------------------------------

DEVICE = torch.device("lazy")
META = torch.device("meta")

Dispatch: TypeAlias = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]


_gradient: Any = torch._C.TensorBase.__dict__["grad"]


class Base:
    """The storage of a tensor without a cell, which was made in a traced step or in the body of a loop.

    written: Whether the step wrote to it in place.
    is_viewed: Whether another tensor of the body of the loop may share it.
    """

    __slots__ = ("is_viewed", "written")

    def __init__(self) -> None:
        self.written = False
        self.is_viewed = False


@dataclass(slots=True, eq=False)
class Handle:
    """The state of a LazyTensor: a meta tensor for shape, strides and type, and the origin of its value.

    meta: The meta tensor.
    cell: The storage; None for a tensor made in a traced step or from values of one.
    trace, value: The number of the trace that made the tensor, and of the value in it.
    base: The storage of a tensor without a cell.
    deferred: The expression of a value of a step, for a tensor of the body of a loop.
    recipe: The Recipe by which a later trace can make the tensor again, if it depends on constants alone.
    """

    meta: torch.Tensor
    cell: Cell | None = None
    trace: int = 0
    value: int = -1
    base: Base | None = None
    deferred: StepValue | None = None
    recipe: object = None


class LazyTensor(torch.Tensor):
    """A tensor on the device: a handle without bytes.

    Outside a traced step, operations run at once on the CPU, on the bytes of the cell. Within a step they are recorded.
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
        with torch.inference_mode(False):  # inference mode allows no view of a tensor from outside of it
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

    # --- Methods that do not reach __torch_dispatch__ by themselves ---------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # Without a read of the value, so that a debugger can show a tensor while the step is traced.
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{DEVICE.type}'{grad})"

    def __str__(self) -> str:
        return repr(self) if context.recorder is None else str(self._known(TraceError))

    def __format__(self, spec: str) -> str:
        # Packages write messages of errors beforehand, which a script cannot change.
        if not spec and (context.recorder is None or is_of_package(sys._getframe(1))):
            return repr(self)
        return format(self.item() if context.recorder is None else self._known(TraceError), spec)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        value = self.cpu() if context.recorder is None else self._known(TraceTypeError)
        return value.numpy(*args, **kwargs)

    def _known(self, error: type[TraceError]) -> torch.Tensor:
        """Returns the value in a traced step; raises the error if it is not known."""
        assert context.recorder is not None
        refusal = text_read() if error is TraceError else value_read(torch.ops.aten._to_copy.default, error)
        value = context.recorder.known_value(self, refusal)
        if value is not None:
            return value
        refuse(refusal)
        return torch.zeros(self.shape, dtype=self.dtype, device="cpu")

    def __array__(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        array = self.detach().numpy()
        return array if dtype is None else array.astype(dtype)

    def data_ptr(self) -> int:
        raise RuntimeError("a tensor on the Cerebras device has no data pointer; use tensor.cpu() outside the step")

    def storage(self) -> NoReturn:
        # Not a RuntimeError: what asks for the pointers of storages goes on without, as safetensors does.
        raise NotImplementedError("a tensor on the Cerebras device has no storage; use tensor.cpu() outside the step")

    def as_subclass(self, cls: type[torch.Tensor]) -> Any:
        if isinstance(self, cls):
            return self
        raise subclass(user_line())

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
        return copy.__reduce_ex__(protocol)

    @property
    def grad(self) -> torch.Tensor | None:
        gradient: torch.Tensor | None = _gradient.__get__(self)
        if gradient is None and context.recorder is not None:
            context.recorder.read_gradients.add(id(self))
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        recorder = context.recorder
        if recorder is not None:
            is_unused = value is None and id(self) not in recorder.stepped
            if is_unused or _gradient.__get__(self) is None:
                recorder.read_gradients.add(id(self))
        _gradient.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """`p.data = v`: takes over the storage of v. torch itself would move the metadata only, not the handle."""
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
    """Returns a device tensor over a whole cell."""
    return LazyTensor(Handle(torch.empty(cell.shape, dtype=cell.dtype, device=META), cell))


def from_cpu(tensor: torch.Tensor) -> LazyTensor:
    """Returns a device tensor with the value of a CPU tensor."""
    cell = Cell(tuple(tensor.shape), tensor.dtype)
    cell.write(tensor)
    return new_tensor(cell)


def known_value(value: Any) -> Any:
    """Returns a value; that of a device tensor as a CPU tensor, or None if it is not known while the step is traced."""
    if not isinstance(value, LazyTensor):
        return value
    return None if context.recorder is None else context.recorder.known_value(value, None)


def cell_of(tensor: torch.Tensor) -> Cell:
    """Returns the cell of a device tensor.

    Raises:
        TypeError: The tensor is not on the device, or was computed in a traced step.
    """
    if not isinstance(tensor, LazyTensor) or tensor._handle.cell is None:
        raise TypeError(f"{tensor!r} is not a tensor that was made on the device outside a traced step")
    return tensor._handle.cell


def is_device(device: Any) -> bool:
    """Whether a device is the Cerebras device, with or without an index."""
    return device is not None and torch.device(device).type == DEVICE.type


_META_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)


def follow_meta(tensor: LazyTensor) -> None:
    """Gives a tensor the shape of its meta tensor after an operation that changed it in place (t_, unsqueeze_)."""
    meta = tensor._handle.meta
    with torch._C._DisableTorchDispatch():
        torch.ops.aten.as_strided_.default.redispatch(
            _META_KEYS, tensor, list(meta.shape), list(meta.stride()), int(meta.storage_offset())
        )


# --- Models -----------------------------------------------------------------------------------------------------------


def move_module(model: nn.Module) -> None:
    """Moves all parameters and buffers of a model to the device, except those without a shape.

    Each Parameter stays the same object if possible, for the optimizers and tied modules that have it.
    """
    _move(model, lambda tensor: not isinstance(tensor, LazyTensor) and not is_lazy(tensor), from_cpu)


def _move(
    model: nn.Module, moves: Callable[[torch.Tensor], bool], move: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Moves the parameters and buffers that `moves` selects by `move`."""
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = []  # weak references, with which a tensor cannot be swapped
        for tensors in cast("tuple[dict[str, Any], ...]", (module._parameters, module._buffers)):
            for name, tensor in list(tensors.items()):
                if tensor is None or not moves(tensor):
                    continue
                if tensor in replaced:
                    tensors[name] = replaced[tensor]
                    continue
                other = moved(tensor, move)
                try:
                    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
                except RuntimeError:  # there is a weak reference to the tensor
                    tensors[name] = replaced[tensor] = other
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


def moved(tensor: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns a tensor moved by `move`: a Parameter with its gradient, if it is one."""
    other: torch.Tensor = move(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, tensor.requires_grad)
        if tensor.grad is not None:
            other.grad = move(tensor.grad)
    return other


_module_to = nn.Module.to


def keep_parameters() -> None:
    """Makes `model.to(...)` and `model.cpu()` keep the Parameters of a model that is moved to the device or from it.

    torch replaces them there, unlike between its own devices: optimizers would step others than the model has.
    """
    nn.Module.to = _to  # type: ignore[method-assign, assignment]
    nn.Module.cpu = _cpu  # type: ignore[method-assign, assignment]


def _to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    if device is not None:
        if is_device(device):
            move_module(self)
        else:
            _move(self, lambda tensor: isinstance(tensor, LazyTensor), lambda tensor: tensor.to(device))
    return _module_to(self, *args, **kwargs)


def _cpu(self: nn.Module) -> nn.Module:
    return _to(self, "cpu")
