"""Passes on text: what `waferbox opt` runs."""

from collections.abc import Callable, Sequence

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import Target
from appliance.compiler.pipeline import PASSES
from appliance.compiler.stages import STAGES, Stages
from cirh.dialect.errors import CirhError
from cirh.modules.verify import verify
from cirh.text.parser import parse_module
from cirh.text.printer import print_module


class OptError(ValueError):
    """A pass is not known, the text is not valid, or a pass refuses it. The message says which, and the line."""


def descriptions() -> dict[str, str]:
    """What passes and stages do, by name, in the order in which a compile runs them."""
    return {step.name: step.description for step in PASSES} | {
        name: stage.description for name, stage in STAGES.items()
    }


def run_passes(
    text: str, file: str, names: Sequence[str], target: Target, after: Callable[[str, str], None] | None = None
) -> str:
    """The text after these passes; the module is verified before them and after each.

    Args:
        text: one module in CIRH. Locations are printed if it has any.
        file: its name, for messages.
        names: of passes, in any order, and then of stages.
        target: what stages divide the work for.
        after: gets the name and the text of each pass.

    Raises:
        OptError: see there.
    """
    _check(names)
    try:
        module = parse_module(text, file)
        verify(module)
    except CirhError as error:
        raise OptError(f"{file}: {error}") from error
    passes = {step.name: step for step in PASSES}
    locations = "loc(" in text
    stages = Stages(module, target, locations=locations)
    made = print_module(module, locations=locations)
    for name in names:
        try:
            if name in STAGES:
                made = STAGES[name].text(stages)
            else:
                passes[name].run(module)
                verify(module)
                made = print_module(module, locations=locations)
        except (CirhError, CompileError) as error:
            raise OptError(f"{file}: {name}: {error}") from error
        if after is not None:
            after(name, made)
    return made


def _check(names: Sequence[str]) -> None:
    known = descriptions()
    stage = ""
    for name in names:
        if name not in known:
            raise OptError(f"there is no pass {name!r}; known are {', '.join(known)}")
        if stage and name not in STAGES:
            raise OptError(f"the pass {name!r} cannot follow {stage!r}, which only shows what becomes of the module")
        stage = name if name in STAGES else ""
