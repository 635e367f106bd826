"""The stages behind the passes: sharding, the cut between wafers and MemoryX, layers and schedules."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Final, NamedTuple

import torch
from xdsl.dialects.builtin import ModuleOp

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import Target
from appliance.compiler.partition.cut import Cut, make_cut
from appliance.compiler.partition.half_gradients import check_half_gradients, round_gradients
from appliance.compiler.partition.precision import insert_casts
from appliance.compiler.passes.canonicalise import canonicalise
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.passes.pass_through import copy_what_passes_through
from appliance.compiler.pipelined.plan import check_target
from appliance.compiler.plan import make_plan
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
from appliance.compiler.sharding.propagate import Sharding, batch_rows, propagate
from cirh.dialect.errors import CirhError
from wsc.v1 import plan_pb2


class Stages:
    """What becomes of a module that the passes are done with. Each stage is computed when it is first asked for.

    All of them raise CompileError: the step cannot run on the target. The module may change: operations that hide
    something of the whole batch are taken apart. `locations`: whether texts have them.
    """

    def __init__(self, module: ModuleOp, target: Target, *, locations: bool = True) -> None:
        self._module = module
        self._target = target
        self._locations = locations

    @cached_property
    def sharding(self) -> Sharding:
        """After casts were inserted, if the precision is mixed: what is cast depends on whose work it is."""
        precision = self._target.precision
        check_target(self._target, batch_rows(self._module, 1))
        check_half_gradients(self._target)
        with self._dividing():
            sharding = propagate(self._module, self._target.num_parts)
            if precision is None:
                return sharding
            insert_casts(make_cut(self._module, sharding), precision)
            canonicalise(self._module)
            eliminate_dead_code(self._module)
            copy_what_passes_through(self._module)  # those copies do nothing, and are gone
            sharding = propagate(self._module, self._target.num_parts)
            if not precision.half_gradients:
                return sharding
            rounded = round_gradients(make_cut(self._module, sharding), self._target)
            eliminate_dead_code(self._module)
            return propagate(self._module, self._target.num_parts, rounded)

    @cached_property
    def cut(self) -> Cut:
        sharding = self.sharding
        with self._dividing():
            return make_cut(self._module, sharding)

    @cached_property
    def plan(self) -> plan_pb2.Plan:
        cut = self.cut
        with self._dividing():
            return make_plan(cut, self._target)

    def sharding_text(self) -> str:
        """The module with the placement of every value."""
        return self._noted(PLACEMENT, placement_notes(self._module, self.sharding))

    def cut_text(self) -> str:
        """The module with who computes what."""
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
            # A part of the batch does not suit an operation that the whole batch suits.
            wafers = self._target.num_csx
            raise CompileError(f"the step cannot be divided over {wafers} wafers: {error}") from error


class Stage(NamedTuple):
    """A stage as text. Notes in it are attributes with a dot in their name, which mean nothing to the program."""

    text: Callable[[Stages], str]
    description: str


STAGES: Final[Mapping[str, Stage]] = {
    "shard": Stage(Stages.sharding_text, "place every value on the wafers: replicated, sharded or partial"),
    "cut": Stage(Stages.cut_text, "divide the work between the wafers and MemoryX"),
    "layers": Stage(Stages.layers_text, "divide the wafers' work into segments by layer"),
    "lair": Stage(Stages.lair_text, "schedule the roles; MemoryX's kernels as loops over scalars"),
    "kernels": Stage(Stages.kernels_text, "schedule the roles; the modules that they run, equal ones once"),
}
