"""Operations lowered, printed, parsed and run, against plain torch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from traced_steps import Getter, Runner, Step, run_module, trace
from xdsl.dialects.builtin import ModuleOp

from cstorch._internal.lowering import lower
from cstorch._internal.tracing import Trace
from waferbox.cirh.dialect.operations import func_of
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module

G = torch.Generator().manual_seed(0)


X = torch.randn(4, 6, generator=G)


Y = torch.rand(4, 6, generator=G) + 0.5


ROW = torch.rand(6, generator=G) + 0.5


COLUMN = torch.rand(4, 1, generator=G)


N = torch.randint(1, 9, (4, 6), generator=G)


MASK = torch.rand(4, 6, generator=G) > 0.5


WIDE = torch.randn(4, 6, generator=G, dtype=torch.float64)


LABELS = torch.tensor([1, 0, -100, 5])


ARGUMENTS = (X, Y, ROW, COLUMN, N, MASK, WIDE, LABELS)


def lowered(step: Step, batch: object, states: Mapping[str, Getter] | None = None) -> tuple[Trace, ModuleOp]:
    traced = trace(step, batch, states)
    module = lower(traced)
    text = print_module(module)
    parsed = parse_module(text)
    verify(parsed)
    assert print_module(parsed) == text
    return traced, module


def names_in(module: ModuleOp) -> list[str]:
    return [op.name for op in func_of(module).block.ops if op.name not in ("cirh.Const", "cirh.return")]


def check(function: Callable[..., Any], batch: tuple[torch.Tensor, ...] = ARGUMENTS) -> ModuleOp:
    traced, module = lowered(lambda batch: function(*batch), batch)
    results = Runner(traced, run_module(module)).step(batch)
    expected = [t for t in torch.utils._pytree.tree_leaves(function(*batch)) if isinstance(t, torch.Tensor)]
    for result, value in zip(results, expected, strict=True):
        assert result.dtype == value.dtype
        torch.testing.assert_close(result, value)
    return module
