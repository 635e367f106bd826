"""The device under the name that it has in releases before 1.9."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cstorch.tracing.tensors.tensor import DEVICE, LazyTensor

XLA = torch.device("xla")


class XlaName(TorchFunctionMode):
    """While it is entered, device tensors are of a device of type `xla`, which torch takes for ours."""

    def __enter__(self) -> "XlaName":
        LazyTensor.device = property(lambda _: XLA)  # type: ignore[assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        del LazyTensor.device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        own = {name: _own_name(value) for name, value in (kwargs or {}).items()}
        return func(*map(_own_name, args), **own)


def _own_name(argument: Any) -> Any:
    is_named = isinstance(argument, str | torch.device) and str(argument).partition(":")[0] == XLA.type
    return DEVICE if is_named else argument
