"""What half precision does to a script's steps: overflow, values lost in gradients, and moves of the loss scale."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from xdsl.dialects.builtin import StringAttr

from waferbox.check.verdict import Answer, Finding, State
from waferbox.checked_run.record import Found, Program, Question
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import func_of
from waferbox.cirh.modules.builder import STATE_NAME
from waferbox.cirh.text.parser import parse_module

# A weight has lost its gradients if this part of the elements that change in float32 does not change in half precision.
_LOST: Final = 0.25
_MOST_NAMED: Final = 4
_WEIGHTS: Final = "state.model"
_SKIPPED: Final = ".num_skipped_steps"
_SCALE: Final = ".loss_scale"

_Key = tuple[int, int]  # execution, step


def steps_before_skip(values: Mapping[_Key, Path]) -> dict[_Key, Path]:
    """Returns the steps before the first one that a loss scale skips."""
    kept: dict[_Key, Path] = {}
    for key in sorted(values):
        if any(name.endswith(_SKIPPED) and bool(tensor.any()) for name, tensor in load_file(values[key]).items()):
            break
        kept[key] = values[key]
    return kept


def half_answer(
    program: Program, cluster: Mapping[_Key, Path], eager: Mapping[_Key, Path], beyond: Sequence[Found]
) -> Answer:
    """Compares the steps of an execution in half precision with those of PyTorch in float32.

    Args:
        program: The step.
        cluster: The files of the run on the cluster.
        eager: The files of the run by PyTorch, which begin with the values before the first step.
        beyond: The operations whose results in float32 no number of the half type can hold.
    """
    keys = [key for key in sorted(cluster.keys() & eager.keys()) if key[0] == program.execution]
    if not keys:
        return Answer(question=Question.HALF, state=State.OPEN, summary="Not compared: no step has run both ways.")
    findings = [*_overflow(keys, cluster, eager, beyond), *_underflow(program, keys, cluster, eager)]
    scale = _loss_scale(cluster[keys[0]], cluster[keys[-1]])
    if findings:
        summary = f"No: {program.half} does not hold all values.{scale}"
        return Answer(question=Question.HALF, state=State.FOUND, summary=summary, findings=tuple(findings))
    summary = f"Yes: in {program.half} all values are finite, and no weight loses its gradients.{scale}"
    return Answer(question=Question.HALF, state=State.GOOD, summary=summary)


def first_not_finite(program: Program, cluster: Mapping[_Key, Path], eager: Mapping[_Key, Path]) -> int | None:
    """Returns the first step after which a value is not finite that is in float32; None: there is none."""
    for key in sorted(cluster.keys() & eager.keys()):
        if key[0] == program.execution and _not_finite(load_file(cluster[key]), load_file(eager[key])):
            return key[1]
    return None


def _not_finite(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    return [
        name.removeprefix("state.")
        for name in sorted(ours.keys() & theirs.keys())
        if bool(theirs[name].isfinite().all()) and not bool(ours[name].isfinite().all())
    ]


def _overflow(
    keys: Sequence[_Key], cluster: Mapping[_Key, Path], eager: Mapping[_Key, Path], beyond: Sequence[Found]
) -> Iterator[Finding]:
    for key in keys:
        names = _not_finite(load_file(cluster[key]), load_file(eager[key]))
        if not names:
            continue
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        reached = (
            f"after step {key[1]} {', '.join(names[:_MOST_NAMED])}{more} are not finite, and in float32 they are"
            f"{_move_of_scale(load_file(cluster[key]))}"
        )
        if not beyond:
            yield Finding(line="", message=reached)
        for found in beyond:
            yield Finding(line=found.line, message=f"{found.message}; {reached}. Scale these values, or use bfloat16")
        return


def _underflow(
    program: Program, keys: Sequence[_Key], cluster: Mapping[_Key, Path], eager: Mapping[_Key, Path]
) -> Iterator[Finding]:
    first = eager.get((program.execution, 0))
    if first is None or not program.trains:
        return
    before, ours, theirs = load_file(first), load_file(cluster[keys[-1]]), load_file(eager[keys[-1]])
    if any(name.endswith(_SKIPPED) and bool(tensor.any()) for name, tensor in ours.items()):
        return  # the weights of a skipped step do not change, whatever their gradients
    lost: list[tuple[str, float]] = []
    for name in before.keys() & ours.keys() & theirs.keys():
        if name.startswith(_WEIGHTS) and before[name].shape == ours[name].shape == theirs[name].shape:
            changes = theirs[name] != before[name]
            part = float(((ours[name] == before[name]) & changes).sum() / changes.sum().clamp(min=1))
            if part > _LOST:
                lost.append((name, part))
    lines = _lines_of_states(program) if lost else {}
    for name, part in sorted(lost, key=lambda one: (-one[1], one[0]))[:_MOST_NAMED]:
        yield Finding(
            line=lines.get(name, ""),
            message=f"{part:.0%} of the values of {name.removeprefix('state.model.')} change in float32 and not in "
            f"{program.half}: their gradients are too small for it. Scale the loss "
            '(`cstorch.amp.GradScaler(loss_scale="dynamic")`), or use bfloat16',
        )


def _lines_of_states(program: Program) -> dict[str, str]:
    """Returns the line of the first operation that uses each state."""
    function = func_of(parse_module(Path(program.path).read_text(encoding="utf-8")))
    arguments = zip(function.block.args, function.argument_attributes, strict=True)
    names = {
        argument: name.data
        for argument, attributes in arguments
        if isinstance(name := attributes.data.get(STATE_NAME), StringAttr)
    }
    lines: dict[str, str] = {}
    for operation in function.block.ops:
        source = source_of(operation)
        for operand in operation.operands:
            if operand in names and source.file:
                lines.setdefault(names[operand], source.place)
    return lines


def _move_of_scale(values: Mapping[str, torch.Tensor]) -> str:
    """Says what the loss scale, if there is one, did in the first step that overflows, as the end of a sentence."""
    for name, tensor in values.items():
        if name.endswith(_SKIPPED):
            scale = float(values[name.removesuffix(_SKIPPED) + _SCALE].max())
            if bool(tensor.any()):
                return f"; the loss scale moved to {scale:g}, and the step was skipped"
            return f"; the loss scale of {scale:g} did not move, as the gradients are finite"
    return ""


def _loss_scale(first: Path, last: Path) -> str:
    """Describes what becomes of the loss scale, as the end of a summary."""
    values, before = load_file(last), load_file(first)
    for name, tensor in values.items():
        if name.endswith(_SCALE):
            skipped = int(values[name.removesuffix(_SCALE) + _SKIPPED].max())
            return (
                f" The loss scale is {float(before[name].max()):g} after the first step and {float(tensor.max()):g} "
                f"after the last; {skipped} of the steps were skipped."
            )
    return ""
