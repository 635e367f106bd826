"""Plain torch with the cluster's random numbers: what the tests of the compiler compare random steps with."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cstorch._internal.tracing import random_counter
from waferbox.cirh.calls.random_numbers import Numbers, bernoulli, draw, integers, normal, uniform

aten = torch.ops.aten


class CountedRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types of it
    """Within it, random operations on the CPU draw what those of a traced step draw: in its first step, and after each
    call of `next_step` in the one that follows. The counter is that of a step traced now, or given."""

    def __init__(self, counter: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._counter = int(random_counter.tensor().cpu()) if counter is None else counter
        self._place = 0

    def next_step(self) -> None:
        self._counter += 1
        self._place = 0

    def _draw(self, numbers: Numbers, shape: Any) -> torch.Tensor:
        key = self._counter + (self._place << 40) & (1 << 64) - 1
        self._place += 1
        return draw(numbers, key, tuple(shape))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        match func:
            case aten.bernoulli_.float:
                return args[0].copy_(self._draw(bernoulli(*(args[1:] or (0.5,))), args[0].shape))
            case aten.bernoulli.default:
                return (self._draw(uniform(args[0].dtype, 0, 1), args[0].shape) < args[0]).to(args[0].dtype)
            case aten.rand.default:
                return self._draw(uniform(dtype, 0, 1), args[0])
            case aten.rand_like.default:
                return self._draw(uniform(args[0].dtype, 0, 1), args[0].shape)
            case aten.randn.default:
                return self._draw(normal(dtype, 0, 1), args[0])
            case aten.randn_like.default:
                return self._draw(normal(args[0].dtype, 0, 1), args[0].shape)
            case aten.uniform_.default:
                return args[0].copy_(self._draw(uniform(args[0].dtype, *(args[1:] or (0, 1))), args[0].shape))
            case aten.normal_.default:
                return args[0].copy_(self._draw(normal(args[0].dtype, *(args[1:] or (0, 1))), args[0].shape))
            case aten.randint.low:
                return self._draw(integers(torch.int64, *args[:2]), args[2])
            case aten._scaled_dot_product_flash_attention_for_cpu.default if not any(args[3:4]):
                return func(*args, **kwargs)  # without dropout it draws nothing
        assert torch.Tag.nondeterministic_seeded not in func.tags, f"{func} draws numbers of torch's own"
        return func(*args, **kwargs)
