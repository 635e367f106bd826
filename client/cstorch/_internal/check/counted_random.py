"""Plain PyTorch with the random numbers of the cluster, so that steps with dropout can be compared."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch._internal.tracing.device.dispatch import DispatchMode
from cstorch._internal.tracing.operators import arguments_by_name, draws_numbers
from cstorch._internal.tracing.random_counter import first_number
from waferbox.cirh.calls.random_numbers import Numbers, bernoulli, draw, integers, normal, uniform

aten = torch.ops.aten


class CountedRandom(DispatchMode):
    """A mode in which random operations on CPU tensors draw what those of a traced step draw.

    It is entered once for each step. A step that draws advances the counter, as on the cluster. Operations that it does
    not know draw torch's own numbers, and are listed in `unknown`.

    counter_of_step: The counter in the current step, or in the last one.
    on_result: Called with the result of each operation, if it is there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown: set[str] = set()
        self.on_result: Callable[[Any], None] | None = None
        self._seed: int | None = None
        self._counter = 0
        self.counter_of_step = 0
        self._drawn = 0  # draws of the current step

    def __enter__(self) -> "CountedRandom":
        if self._seed != torch.initial_seed():
            self._seed = torch.initial_seed()
            self._counter = first_number(self._seed, 0)
        self._drawn = 0
        self.counter_of_step = self._counter
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._drawn:
            self._counter += 1

    def _draw(self, make: Any, dtype: torch.dtype, shape: Any, *arguments: float) -> torch.Tensor:
        # In float64, which judges the rounding of float32, the numbers are those of float32.
        drawn = torch.float32 if dtype is torch.float64 else dtype
        return self._numbers(make(drawn, *arguments), shape).to(dtype)

    def _numbers(self, numbers: Numbers, shape: Any) -> torch.Tensor:
        key = self._counter + (self._drawn << 40) & (1 << 64) - 1
        self._drawn += 1
        return draw(numbers, key, tuple(shape))

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = self._call(func, args, kwargs)
        if self.on_result is not None:
            self.on_result(result)
        return result

    def _call(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        given = dict(kwargs or {})
        if not draws_numbers(func, args, given):
            return func(*args, **given)
        dtype = given.get("dtype") or torch.get_default_dtype()
        match func:
            case aten.bernoulli_.float:
                return args[0].copy_(self._numbers(bernoulli(*(args[1:] or (0.5,))), args[0].shape))
            case aten.bernoulli.default:
                return (self._draw(uniform, args[0].dtype, args[0].shape, 0, 1) < args[0]).to(args[0].dtype)
            case aten.rand.default:
                return self._draw(uniform, dtype, args[0], 0, 1)
            case aten.rand_like.default:
                return self._draw(uniform, given.get("dtype") or args[0].dtype, args[0].shape, 0, 1)
            case aten.randn.default:
                return self._draw(normal, dtype, args[0], 0, 1)
            case aten.randn_like.default:
                return self._draw(normal, given.get("dtype") or args[0].dtype, args[0].shape, 0, 1)
            case aten.uniform_.default:
                return args[0].copy_(self._draw(uniform, args[0].dtype, args[0].shape, *(args[1:] or (0.0, 1.0))))
            case aten.normal_.default:
                return args[0].copy_(self._draw(normal, args[0].dtype, args[0].shape, *(args[1:] or (0.0, 1.0))))
            case aten.randint.default:
                return self._numbers(integers(given.get("dtype") or torch.int64, 0, args[0]), args[1])
            case aten.randint.low:
                return self._numbers(integers(given.get("dtype") or torch.int64, *args[:2]), args[2])
            case aten.rrelu_with_noise.default:
                named = arguments_by_name(func, args, given)
                slopes = self._draw(uniform, args[0].dtype, args[0].shape, named["lower"], named["upper"])
                return args[0] * args[1].copy_(torch.where(args[0] <= 0, slopes, 1))
        self.unknown.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **given)
