"""The compiler: makes a plan from CIRH text, by passes and stages, which `waferbox opt` can also run alone.

First the passes on the module (`PASSES`) run in order; each changes the module in place. Then the stages (`STAGES`)
divide the work and schedule the roles.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import torch
from xdsl.dialects.builtin import ModuleOp

from appliance.compiler.core.errors import CompileError, WaferMemoryError
from appliance.compiler.core.progress import progress
from appliance.compiler.core.target import ExecutionStrategy, Half, KernelLibrary, Precision, Target
from appliance.compiler.partition.cut import Cut, make_cut
from appliance.compiler.partition.precision import check_half_gradients, insert_casts, round_gradients
from appliance.compiler.passes.canonicalise import canonicalise
from appliance.compiler.passes.cse import join_common_subexpressions
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.passes.fold import fold_constants
from appliance.compiler.passes.fuse_attention import fuse_attention
from appliance.compiler.passes.fuse_bias import fuse_bias
from appliance.compiler.passes.fuse_cross_entropy import fuse_cross_entropy
from appliance.compiler.passes.fuse_layer_norm import fuse_layer_norm
from appliance.compiler.passes.fuse_linear_cross_entropy import fuse_linear_cross_entropy
from appliance.compiler.passes.pass_through import copy_passed_values
from appliance.compiler.passes.sink_broadcasts import sink_broadcasts
from appliance.compiler.passes.vendor.norms import replace_norms
from appliance.compiler.passes.vendor.random_keys import add_random_keys
from appliance.compiler.passes.vendor.replacements import (
    replace_floor_divisions,
    replace_gathers,
    replace_slices,
    replace_uneven_pools,
)
from appliance.compiler.pipelined.plan import check_target
from appliance.compiler.plan import FittedWafer, fit_wafer, make_plan
from appliance.compiler.report.notes import (
    PLACEMENT,
    SEGMENT,
    SITE,
    Notes,
    kernels_text,
    loops_text,
    noted_text,
    placement_notes,
    segment_notes,
    site_notes,
)
from appliance.compiler.sharding.gathered import refuse_gathers
from appliance.compiler.sharding.propagate import Sharding, batch_rows, propagate
from waferbox.cirh import CirhError
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module
from wsc.v1 import plan_pb2

# --- Stages -----------------------------------------------------------------------------------------------------------


class Stages:
    """The results of the stages for a module, each computed when it is first used.

    The module may change: casts are inserted, and operations that contain a statistic of the whole batch are
    decomposed. Each stage raises CompileError if the step cannot run on the target.
    """

    def __init__(self, module: ModuleOp, target: Target, *, locations: bool = True) -> None:
        """locations: whether texts have source locations."""
        self._module = module
        self._target = target
        self._locations = locations

    @cached_property
    def sharding(self) -> Sharding:
        """The sharding of the module, after casts were inserted if the precision is mixed."""
        check_target(self._target, batch_rows(self._module, 1))
        check_half_gradients(self._target)
        progress("placing the values on the wafers")
        with self._dividing():
            sharding = self._sharding_in_precision()
            if self._target.strict_sharding:
                refuse_gathers(self._module, sharding)
            return sharding

    def _sharding_in_precision(self) -> Sharding:
        """Casts depend on a first sharding and cut, as only the wafers compute in half precision."""
        precision = self._target.precision
        sharding = propagate(self._module, self._target.num_parts)
        if precision is None:
            return sharding
        insert_casts(make_cut(self._module, sharding), precision)
        canonicalise(self._module)
        eliminate_dead_code(self._module)
        copy_passed_values(self._module)  # canonicalise has removed the copies of the first time
        sharding = propagate(self._module, self._target.num_parts)
        if not precision.half_gradients:
            return sharding
        rounded = round_gradients(make_cut(self._module, sharding), self._target)
        eliminate_dead_code(self._module)
        return propagate(self._module, self._target.num_parts, rounded)

    @cached_property
    def cut(self) -> Cut:
        sharding = self.sharding
        progress("dividing the work between the wafers and MemoryX")
        with self._dividing():
            return make_cut(self._module, sharding)

    @cached_property
    def wafer(self) -> FittedWafer | None:
        """The wafer's part of the plan; None in layer pipelined mode."""
        if self._target.execution_strategy is ExecutionStrategy.PIPELINE:
            return None
        cut = self.cut
        with self._dividing():
            return fit_wafer(cut, self._target)

    @cached_property
    def plan(self) -> plan_pb2.Plan:
        cut, wafer = self.cut, self.wafer
        with self._dividing():
            return make_plan(cut, self._target, wafer)

    def with_target(self, target: Target) -> "Stages":
        """The stages for another target that has the same cut."""
        other = copy(self)
        other._target = target
        return other

    def has_cut_of(self, target: Target) -> bool:
        """Whether the cut is that of another target: only the plan depends on slices and on what is computed again."""
        alike = replace(
            self._target,
            recomputes=target.recomputes,
            row_slices=target.row_slices,
            slices_attention=target.slices_attention,
            saves_memory=target.saves_memory,
        )
        return alike == target

    def sharding_text(self) -> str:
        """The module with the placement of every value."""
        return self._noted(PLACEMENT, placement_notes(self._module, self.sharding))

    def cut_text(self) -> str:
        """The module with the roles that run each operation."""
        return self._noted(SITE, site_notes(self.cut))

    def layers_text(self) -> str:
        """The module with the segment of each of the wafers' operations."""
        return self._noted(SEGMENT, segment_notes(self.cut))

    def kernels_text(self) -> str:
        """The modules that wafers and MemoryX run."""
        return kernels_text(self.plan)

    def lair_text(self) -> str:
        """The loops that MemoryX runs."""
        return loops_text(self.plan)

    def _noted(self, name: str, notes: Notes) -> str:
        return noted_text(self._module, name, notes, locations=self._locations)

    @contextmanager
    def _dividing(self) -> Iterator[None]:
        try:
            with torch.no_grad():
                yield
        except CirhError as error:
            # An operation that accepts the whole batch may refuse the shapes of a part.
            wafers = self._target.num_csx
            raise CompileError(f"the step cannot be divided over {wafers} wafers: {error}") from error


class Stage(NamedTuple):
    """The text of a stage. Its notes are attributes with a dot in their name, which do not change the program."""

    text: Callable[[Stages], str]
    description: str


STAGES: Final[Mapping[str, Stage]] = {
    "shard": Stage(Stages.sharding_text, "place every value on the wafers: replicated, sharded or partial"),
    "cut": Stage(Stages.cut_text, "divide the work between the wafers and MemoryX"),
    "layers": Stage(Stages.layers_text, "divide the wafers' work into segments by layer"),
    "lair": Stage(Stages.lair_text, "schedule the roles; MemoryX's kernels as loops over scalars"),
    "kernels": Stage(Stages.kernels_text, "schedule the roles; the modules that they run, equal ones once"),
}

# --- Passes and the compiler ------------------------------------------------------------------------------------------

__all__ = [
    "PASSES",
    "CompileError",
    "CompiledStep",
    "Half",
    "KernelLibrary",
    "Pass",
    "Precision",
    "Target",
    "compile_module",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass: changes a module in place. `run` returns whether it changed anything."""

    name: str
    description: str
    run: Callable[[ModuleOp], bool]


def _verify(module: ModuleOp) -> bool:
    verify(module)
    return False


PASSES: Final = tuple(
    Pass(name=name, run=run, description=description)
    for name, run, description in (
        ("verify", _verify, "infer every type anew; refuse what does not hold together"),
        ("random-keys", add_random_keys, "a counter, and keys made of it, for random numbers that come without"),
        ("norms", replace_norms, "norms of the real dialect -> torch's, which share their statistics"),
        ("pools", replace_uneven_pools, "adaptive pooling to sizes that do not divide -> torch's"),
        ("divisions", replace_floor_divisions, "integers divided by //, which the real dialect cuts -> torch's"),
        ("gathers", replace_gathers, "torch.gather as the real dialect has it -> torch's"),
        ("slices", replace_slices, "slices of the real dialect -> torch's, and padding for their gradients"),
        ("canonicalise", canonicalise, "drop operations that do nothing, join views, put transposes inside products"),
        ("fold", fold_constants, "compute what depends on constants alone, where it stays small"),
        ("sink-broadcasts", sink_broadcasts, "move broadcasts behind element-wise operations"),
        ("cse", join_common_subexpressions, "join equal operations within a layer"),
        ("fuse-bias", fuse_bias, "product + bias -> aten.addmm"),
        ("fuse-layer-norm", fuse_layer_norm, "layer norm that is written out -> aten.native_layer_norm"),
        ("fuse-cross-entropy", fuse_cross_entropy, "softmax cross entropy and its gradient -> one operation"),
        ("fuse-linear-cross-entropy", fuse_linear_cross_entropy, "product + cross entropy -> cirh.LinearCrossEntropy"),
        ("fuse-attention", fuse_attention, "attention that is written out -> cirh.Attention"),
        ("dce", eliminate_dead_code, "drop what no result depends on"),
        ("pass-through", copy_passed_values, "give results that are arguments or constants a copy of their own"),
    )
)


class CompiledStep:
    """A step whose passes have run, which do not depend on the target. It is planned for as many targets as are tried.

    module: the step after the passes. Planning does not change it.
    """

    def __init__(self, text: str, keep: Callable[[str, str], None] | None = None) -> None:
        """Parses the step and runs the passes.

        Args:
            text: a module in CIRH. It comes from a script, so nothing in it is trusted.
            keep: called with the name and the text of each pass that changed the module.

        Raises:
            CirhError: the text is not a valid module.
            CompileError: a pass refuses the step.
        """
        progress("reading the step")
        self.module = parse_module(text)
        # The last that did not fit: the same targets are tried again with `recomputes`.
        self._refused: deque[Stages] = deque(maxlen=2)
        for number, step in enumerate(PASSES, 1):
            progress(f"running the pass {step.name}")
            if step.run(self.module) and keep is not None:
                keep(f"{number:02}-{step.name}", print_module(self.module))

    def plan(self, target: Target, keep: Callable[[str, str], None] | None = None) -> plan_pb2.Plan:
        """Makes the plan for a target.

        Args:
            target: the cluster to compile for.
            keep: as of `planned`.

        Returns:
            The plan, which is the same for the same step and target.

        Raises:
            CompileError: the step cannot run on the target.
        """
        return planned(self.fit(target), keep)

    def fit(self, target: Target) -> Stages:
        """Runs the stages that show whether the step fits a wafer: all up to the wafer's part of the plan.

        In layer pipelined mode the whole plan shows it.

        Raises:
            CompileError: the step cannot run on the target.
        """
        refused = next((stages for stages in self._refused if stages.has_cut_of(target)), None)
        stages = Stages(self.module.clone(), target) if refused is None else refused.with_target(target)
        try:
            if stages.wafer is None:
                stages.plan  # noqa: B018 - it is kept
        except WaferMemoryError:
            self._refused.append(stages)
            raise
        return stages


def planned(stages: Stages, keep: Callable[[str, str], None] | None = None) -> plan_pb2.Plan:
    """Makes the plan of stages that fit.

    Args:
        stages: the result of `CompiledStep.fit`.
        keep: called with the name and the text of each stage. Making the texts takes as long as making the plan.

    Raises:
        CompileError: a role cannot be scheduled.
    """
    plan = stages.plan
    if keep is not None:
        for number, (name, stage) in enumerate(STAGES.items(), len(PASSES) + 1):
            progress(f"writing the stage {name} to the artifact")
            keep(f"{number:02}-{name}", stage.text(stages))
    return plan


def compile_module(text: str, target: Target, keep: Callable[[str, str], None] | None = None) -> plan_pb2.Plan:
    """Compiles a step for one target; arguments, result and errors are those of `CompiledStep`."""
    return CompiledStep(text, keep).plan(target, keep)


# --- Passes on text (`waferbox opt`) ----------------------------------------------------------------------------------


class OptError(ValueError):
    """Raised for an unknown pass, an invalid text, or a text that a pass refuses. The message names the line."""


def descriptions() -> dict[str, str]:
    """Descriptions of passes and stages, by name, in the order in which a compile runs them."""
    return {step.name: step.description for step in PASSES} | {
        name: stage.description for name, stage in STAGES.items()
    }


def run_passes(
    text: str, file: str, names: Sequence[str], target: Target, after: Callable[[str, str], None] | None = None
) -> str:
    """Runs passes and stages on a text. The module is verified first and after each pass.

    Args:
        text: a module in CIRH. Locations are printed if it has any.
        file: name of the file, for messages.
        names: names of passes, in any order, followed by names of stages.
        target: the cluster for which stages divide the work.
        after: called with the name and the text of each pass and stage.

    Returns:
        The text after the last of them.

    Raises:
        OptError: a name is unknown, the text is not valid, or a pass refuses it.
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
        progress(f"running the pass {name}")
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
