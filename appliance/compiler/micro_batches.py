"""Chooses the number of micro-batches of a wafer: as the script says, as few as fit its memory, or the fastest."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from appliance.compiler.core.errors import CompileError, WaferMemoryError
from appliance.compiler.core.target import ExecutionStrategy, MicroBatching, Target
from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.pipeline import CompiledStep, planned
from appliance.compiler.pipelined.plan import check_target
from appliance.compiler.pipelined.regions import NOMINAL
from appliance.compiler.report.builder import make_report
from appliance.compiler.sharding.propagate import batch_rows
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.operations import body_ops
from waferbox.runtime.schedule import THREADED_FLOPS
from wsc.v1 import plan_pb2

# The most micro-batches for each core that are tried.
_MOST_PER_CORE: Final = 4
# The numbers of slices of a row that are tried. Each slice reads the layer's weights once more.
_NUMBERS_OF_SLICES: Final = (2, 4, 8, 16, 32, 64)

Keep = Callable[[str, str], None]


class _Candidate:
    """A target that the step fits, whose plan may be chosen. Raises as `CompiledStep.fit`."""

    def __init__(self, step: CompiledStep, target: Target) -> None:
        self._stages = step.fit(target)

    @property
    def num_instructions(self) -> int:
        """The length of a wafer's program, in weight streaming."""
        assert self._stages.wafer is not None
        return len(self._stages.wafer.schedule.plan.instructions)

    @property
    def plan(self) -> plan_pb2.Plan:
        """The plan, made when it is first read. Raises as `planned`."""
        return self._stages.plan

    def chosen(self, keep: Keep | None) -> plan_pb2.Plan:
        """Passes the texts of the stages on to `keep`, and returns the plan. Raises as `planned`."""
        return planned(self._stages, keep)


def compile_in_micro_batches(
    text: str,
    target: Target,
    asked: MicroBatching | None,
    machine: Callable[[], MachineModel],
    keep: Keep | None = None,
) -> plan_pb2.Plan:
    """Compiles a step with micro-batches.

    A step that does not fit keeps only what each layer reads, and computes the layer's activations again in the
    backward pass. If a size that is asked for does not fit even so, or does not divide a wafer's rows, the largest one
    below it is taken that does; the plan has the refusal. If a single row does not fit, it is computed in slices.

    Args:
        text: a module in CIRH.
        target: the cluster to compile for.
        asked: how the batch is divided; None: as `target.micro_batches` says.
        machine: returns the rates from which times are predicted; called only if they are needed.
        keep: as of `compile_module`.

    Raises:
        CirhError: as `compile_module`.
        CompileError: as `compile_module`, or if the batch cannot be divided so.
    """
    step = CompiledStep(text, keep)
    rows = _rows_of_a_wafer(step, target) if asked is not None and asked.size else 0
    if asked is None or not asked.size or rows % asked.size == 0:
        return _compiled(step, target, asked, machine, keep)
    size = next(size for size in _sizes(rows) if size <= asked.size)
    plan = _compiled(step, target, replace(asked, size=size), machine, keep)
    who = "a wafer" if target.num_replicas == 1 else "a replica"
    why = f"it does not divide the {rows} rows that {who} has; {size} rows are taken instead"
    plan.explored.insert(0, plan_pb2.ExploredSize(size=asked.size, refusal=why))
    return plan


def _compiled(
    step: CompiledStep,
    target: Target,
    asked: MicroBatching | None,
    machine: Callable[[], MachineModel],
    keep: Keep | None,
) -> plan_pb2.Plan:
    """Compiles with micro-batches of a size that divides the rows; arguments and errors as of the caller."""
    try:
        return _divided(step, target, asked, machine, keep)
    except WaferMemoryError as error:
        if target.execution_strategy is ExecutionStrategy.PIPELINE:
            raise
        refusal = error
    recomputing = replace(target, recomputes=True)
    size = 0 if asked is None else asked.size
    try:
        return _divided(step, recomputing, asked, machine, keep)
    except WaferMemoryError as error:
        tried = [(target, refusal), (recomputing, error)]
    plan = _below(step, tried, size, keep) if size > 1 else None
    if plan is None:
        if asked is not None:
            recomputing = replace(recomputing, micro_batches=_rows_of_a_wafer(step, target))
        plan = _in_slices(step, recomputing, keep)
    taken = plan.worker.local_rows // plan.worker.micro_batches
    if taken < size:
        plan.explored.add(size=size, refusal=f"{_first_part(refusal)}; {taken} rows are taken instead")
    return plan


def _divided(
    step: CompiledStep,
    target: Target,
    asked: MicroBatching | None,
    machine: Callable[[], MachineModel],
    keep: Keep | None,
) -> plan_pb2.Plan:
    """Compiles with micro-batches as they are asked for; arguments and errors as of `compile_in_micro_batches`."""
    if asked is None:
        return step.plan(target, keep)
    if asked.explore:
        return _fastest(step, target, asked, machine(), keep)
    if asked.size:
        return step.plan(replace(target, micro_batches=_rows_of_a_wafer(step, target) // asked.size), keep)
    if target.execution_strategy is ExecutionStrategy.PIPELINE:
        return _fastest_pipeline(step, target, keep)
    return _largest(step, target, keep)


def _fastest_pipeline(step: CompiledStep, target: Target, keep: Keep | None) -> plan_pb2.Plan:
    """Compiles with the number of micro-batches that fits and is predicted to be the fastest.

    More micro-batches keep more regions busy for more of the step, but add fixed costs. The search ends at the first
    number that is slower.
    """
    rows = _rows_of_a_wafer(step, target)
    best: tuple[float, _Candidate] | None = None
    too_large: WaferMemoryError | None = None
    for count in (count for count in range(1, min(rows, _MOST_PER_CORE * target.wafer_cores) + 1) if rows % count == 0):
        try:
            candidate = _Candidate(step, replace(target, micro_batches=count))
        except WaferMemoryError as error:
            too_large = error
            continue
        except CompileError as error:
            if best is not None:
                break  # a batch that is not divided is possible, micro-batches are not
            if too_large is not None:
                raise CompileError(f"{too_large}; micro-batches do not help: {error}") from error
            raise
        if candidate.plan.pipeline.flops < THREADED_FLOPS:
            # The regions of a small step run in one thread, where more micro-batches gain nothing.
            best = 0.0, candidate
            break
        seconds = make_report(candidate.plan, "", NOMINAL).totals.step_seconds
        if best is not None and seconds >= best[0]:
            break
        best = seconds, candidate
    if best is None:
        assert too_large is not None
        raise too_large
    return best[1].chosen(keep)


def _below(
    step: CompiledStep, tried: Sequence[tuple[Target, WaferMemoryError]], size: int, keep: Keep | None
) -> plan_pb2.Plan | None:
    """Compiles with the largest micro-batches below a refused size that fit, for the first target with such; else None.

    tried: the targets, each with its refusal of the size.
    """
    for target, refusal in tried:
        with suppress(WaferMemoryError):
            return _largest(step, target, keep, above=(size, refusal))
    return None


def _in_slices(step: CompiledStep, target: Target, keep: Keep | None) -> plan_pb2.Plan:
    """Compiles with rows in as few slices as fit without more runs of layers and receptions of weights.

    Slices go through attention, too, only if nothing fits otherwise: each adds to the gradients of all keys. What saves
    memory in other ways comes last.
    """
    for sliced in _targets_in_slices(step, target):
        try:
            most = _Candidate(step, replace(sliced, row_slices=_NUMBERS_OF_SLICES[-1]))
            break
        except WaferMemoryError:
            if sliced.saves_memory:
                raise
    fits = most
    begin, end = 0, len(_NUMBERS_OF_SLICES) - 1  # the numbers before `begin` do not fit, that of `end` does
    while begin < end:
        middle = (begin + end) // 2
        try:
            candidate = _Candidate(step, replace(sliced, row_slices=_NUMBERS_OF_SLICES[middle]))
            is_good = candidate.num_instructions == most.num_instructions
        except WaferMemoryError:
            is_good = False
        if is_good:
            fits, end = candidate, middle
        else:
            begin = middle + 1
    return fits.chosen(keep)


def _targets_in_slices(step: CompiledStep, target: Target) -> Iterator[Target]:
    """Yields the targets for which rows are computed in slices, those that need more memory first."""
    yield target
    if any(op.name == "cirh.Attention" and attrs(op).get("is_causal") for op in body_ops(step.module)):
        target = replace(target, slices_attention=True)
        yield target
    yield replace(target, saves_memory=True)


def _largest(
    step: CompiledStep, target: Target, keep: Keep | None, above: tuple[int, WaferMemoryError] | None = None
) -> plan_pb2.Plan:
    """Compiles with the largest micro-batches that fit a wafer's memory.

    A refusal estimates the rows that would fit, so that only a few sizes have to be compiled. The estimate is no proof:
    where it says that nothing fits, single rows are tried, and from there the sizes between.

    Args:
        step: the step.
        target: the cluster, with the largest size that is tried if there is no `above`.
        keep: as of `compile_in_micro_batches`.
        above: a size that was refused, and its refusal; only sizes below it are tried.
    """
    rows = _rows_of_a_wafer(step, target)
    if above is None:
        try:
            return step.plan(target, keep)
        except WaferMemoryError as error:
            size, too_large = rows // target.micro_batches, error
    else:
        size, too_large = above
    sizes = [smaller for smaller in _sizes(rows) if smaller <= size]
    last = too_large
    fits: _Candidate | None = None
    refused, fitting = 0, len(sizes)  # the places of the last size that was refused, and of the first that fits
    while refused + 1 < fitting:
        estimate = last.fitting_share * sizes[refused]
        is_estimated = False
        if fits is not None:
            place = (refused + fitting) // 2
        elif estimate < 1:
            place = fitting - 1
        elif above is not None and not refused:
            place = 1  # as near to the size that was asked for as possible
        else:
            place = next(place for place in range(refused + 1, fitting) if sizes[place] <= estimate)
            is_estimated = True
        try:
            fits = _Candidate(step, replace(target, micro_batches=rows // sizes[place]))
            fitting = place
            if is_estimated:
                break
        except WaferMemoryError as error:
            refused, last = place, error
        except CompileError as error:
            raise CompileError(f"{too_large}; micro-batches do not help: {error}") from error
    if fits is None:
        raise last
    return fits.chosen(keep)


def _fastest(
    step: CompiledStep, target: Target, asked: MicroBatching, machine: MachineModel, keep: Keep | None
) -> plan_pb2.Plan:
    """Compiles with the micro-batches with which the step is predicted to be the fastest. The plan lists all tried."""
    rows = _rows_of_a_wafer(step, target)
    tried: list[plan_pb2.ExploredSize] = []
    best: tuple[float, _Candidate] | None = None
    for size in _sizes(rows):
        if not asked.min_size <= size <= (asked.max_size or rows):
            continue
        try:
            candidate = _Candidate(step, replace(target, micro_batches=rows // size))
            plan = candidate.plan
        except CompileError as error:
            tried.append(plan_pb2.ExploredSize(size=size, refusal=_first_part(error)))
            continue
        report = make_report(plan, "", machine)
        rate = report.totals.rows_per_second
        tried.append(plan_pb2.ExploredSize(size=size, rows_per_second=rate, wafer_bytes=report.memory.needed_bytes))
        if best is None or rate > best[0]:
            best = rate, candidate
    if best is None:
        bounds = f"from {max(asked.min_size, 1)} to {asked.max_size or rows}"
        why = f": {tried[-1].size} rows: {tried[-1].refusal}" if tried else f", as none divides a wafer's {rows} rows"
        raise CompileError(f"no micro-batch size {bounds} can be compiled{why}; explore others")
    plan = best[1].chosen(keep)
    plan.explored.extend(tried)
    return plan


def _first_part(error: CompileError) -> str:
    """The problem, without the way out."""
    return str(error).split(";")[0]


def _rows_of_a_wafer(step: CompiledStep, target: Target) -> int:
    """The rows of a wafer, or of a replica if a wafer has several."""
    rows = batch_rows(step.module, target.num_csx)
    check_target(target, rows)
    return rows // (target.num_csx * target.num_replicas)


def _sizes(rows: int) -> Iterator[int]:
    """All sizes that divide the rows, the largest first."""
    return (size for size in range(rows, 0, -1) if rows % size == 0)
