"""The form of a LAIR kernel: statements that run once, and a loop of statements that run for each element."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from waferbox.cirh.dialect.elements import element_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A buffer that is read: one number, or, if `whole`, one for each element."""

    value: int
    dtype: torch.dtype
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One scalar operation. All its operands have one type, except the condition of a select."""

    value: int
    opcode: str
    operands: tuple[int, ...]
    dtype: torch.dtype  # of the value
    literal: float | int | bool | None = None  # of a const


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A buffer that is written: one number, or, if `whole`, one for each element."""

    value: int
    dtype: torch.dtype
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopKernel:
    """A kernel. It reads an element of all arguments before it writes one, so results may share arguments' buffers."""

    arguments: tuple[Argument, ...]
    once: tuple[Statement, ...]
    loop: tuple[Statement, ...]
    results: tuple[Result, ...]

    def __str__(self) -> str:
        """The kernel as text, equal for equal kernels."""
        lines = ["waferbox.lair.kernel {"]
        lines += [f"  %{a.value} = load arg{i}[] : {_name(a.dtype)}" for i, a in _numbered(self.arguments, whole=False)]
        lines += [f"  {_text(statement)}" for statement in self.once]
        wholes = [*_numbered(self.arguments, whole=True), *_numbered(self.results, whole=True)]
        if wholes:
            lines.append("  for i in 0..n {")
            lines += [
                f"    %{a.value} = load arg{k}[i] : {_name(a.dtype)}" for k, a in _numbered(self.arguments, whole=True)
            ]
            lines += [f"    {_text(statement)}" for statement in self.loop]
            lines += [f"    store %{r.value}, result{k}[i]" for k, r in _numbered(self.results, whole=True)]
            lines.append("  }")
        lines += [f"  store %{r.value}, result{k}[]" for k, r in _numbered(self.results, whole=False)]
        return "\n".join([*lines, "}", ""])


def _numbered(buffers: Iterable[Argument | Result], *, whole: bool) -> list[tuple[int, Argument | Result]]:
    return [(number, buffer) for number, buffer in enumerate(buffers) if buffer.whole is whole]


def _text(statement: Statement) -> str:
    operands = [f"%{operand}" for operand in statement.operands]
    if statement.literal is not None:
        operands.append(repr(statement.literal))
    return f"%{statement.value} = {statement.opcode} {', '.join(operands)} : {_name(statement.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return element_name(dtype)
