"""The lines of a step whose values a half precision type cannot hold, found while plain PyTorch runs it in float32."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from cstorch._internal.tracing import user_line
from cstorch._internal.tracing.device.dispatch import DispatchMode

_MOST_LINES: Final = 4


class HalfRange(DispatchMode):
    """A mode that notes the operations whose results are larger than any number of a half type.

    Attributes:
        beyond: what such operations gave, by the script's line, in the order of the step.

    Args:
        half: The half type.
    """

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.beyond: dict[str, str] = {}
        self._half = half

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        largest = torch.finfo(self._half).max
        for leaf in pytree.tree_leaves(result) if len(self.beyond) < _MOST_LINES else ():
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
                most = float(leaf.detach().abs().max())
                if largest < most < torch.inf:
                    self.beyond.setdefault(
                        user_line(),
                        f"`{func._schema.name}` gives values of {most:.2g}, and the largest of "
                        f"{str(self._half).removeprefix('torch.')} is {largest:.6g}",
                    )
        return result
