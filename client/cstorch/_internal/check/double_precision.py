"""Steps of plain PyTorch in float64, which judges the rounding of float32."""

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch._internal.tracing.device.dispatch import DispatchMode


class DoublePrecision(DispatchMode):
    """A mode in which what a step asks for in float32, by name or by default, is float64.

    Else `images.float()` in a step would give float32 beside the weights in float64, which few operations take.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._default = torch.float32

    def __enter__(self) -> "DoublePrecision":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        return func(*map(_doubled, args), **named)


def _doubled(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
