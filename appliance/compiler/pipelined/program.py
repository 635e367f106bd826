"""Makes the regions' programs: an instruction for each ordered task, and waits before a state is overwritten.

At run time a region waits only for the values that it reads. Where a task must also come after readers of a state that
it overwrites, and the order of the instructions does not guarantee this, the region gets an additional Run that reads a
result of that reader and computes nothing. Vector clocks (as in `order.py`) show where one is needed.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from xdsl.ir import SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import Target
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import REDUCTIONS, KernelTable, Numbers
from appliance.compiler.pipelined.build import Built
from appliance.compiler.pipelined.graph import WAY_OUT, RegionWork, WorkKind, repeated_writers
from appliance.compiler.pipelined.schedule import SHARED, Key, Layout, Task, order_tasks
from appliance.compiler.wafer_schedule.schedule import add_drops
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import func_of
from waferbox.cirh.dialect.types import AnyTensorType
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module
from wsc.v1 import plan_pb2

# The number of instructions of each region that have certainly been run.
Clock = tuple[int, ...]


def make_program(cut: Cut, built: Built, numbers: Numbers, target: Target) -> plan_pb2.PipelinePlan:
    """Makes the pipeline of a plan; its sizes (memory, arithmetic) are left empty."""
    program = _Program(cut, built, numbers)
    regions = built.regions
    layout = Layout(regions=len(regions.layers), replicas=target.num_replicas, micro_batches=target.micro_batches)
    for task in order_tasks(built.graph, layout):
        program.add(task)
    return program.finish(target)


class _Program:
    """Appends tasks, which come in an order in which they can be run, to the lists of their regions."""

    def __init__(self, cut: Cut, built: Built, numbers: Numbers) -> None:
        self._cut = cut
        self._built = built
        self._numbers = numbers
        self._kernels = KernelTable()
        self._plan = plan_pb2.PipelinePlan(regions=built.regions.messages())
        count = len(self._plan.regions)
        self._now: list[Clock] = [(0,) * count] * count  # by region: the clock after its last instruction
        self._makers: dict[Key, list[Task]] = defaultdict(list)
        self._behind: dict[Task, Clock] = {}  # by task: the clock after it
        self._tasks: dict[RegionWork, list[Task]] = defaultdict(list)

    def add(self, task: Task) -> None:
        """Appends a task, after waits for the reads of the states that it overwrites."""
        region = task.region
        # A task that has read a value comes after everything that came before the value.
        before = [maker for key in task.reads for maker in self._makers[key]]
        clock = _latest([self._now[region], *(self._behind[maker] for maker in before)])
        for other in (*self._unread(task, clock), *self._unreplaced(task, clock)):
            self._wait(region, other)
            clock = _latest([clock, self._now[region]])
        self._append(region, clock, self._instruction(task))
        self._behind[task] = self._now[region]
        self._tasks[task.work].append(task)
        for key in task.makes:
            self._makers[key].append(task)

    def _unread(self, task: Task, clock: Clock) -> Iterable[Task]:
        """In each other region, the last reader of a state that a task overwrites, unless it has certainly been run."""
        graph = self._built.graph
        readers = graph.before(task.work)
        if task.work.repeated:
            readers = [*readers, *graph.readers_of_new(task.work)]
        return self._last([reader for item in readers for reader in self._tasks[item]], task.region, clock)

    def _unreplaced(self, task: Task, clock: Clock) -> Iterable[Task]:
        """In each other region, the last task that replaces a state that a task reads, unless it has certainly run."""
        writers = repeated_writers(self._built.graph, task.work)
        return self._last([writer for item in writers for writer in self._tasks[item]], task.region, clock)

    def _last(self, tasks: Iterable[Task], own: int, clock: Clock) -> Iterable[Task]:
        """The last of the tasks in each region but the own one, of those that may not have been run yet."""
        last: dict[int, Task] = {}
        for task in tasks:
            region = task.region
            place = self._behind[task][region]
            known = last.get(region)
            if place > clock[region] and (known is None or place > self._behind[known][region]):
                last[region] = task
        last.pop(own, None)
        return last.values()

    def _wait(self, region: int, other: Task) -> None:
        """Appends a Run that waits for a value of another task, and computes nothing."""
        if not other.makes:  # a commit
            assert other.work.repeated, "what is sent or copied lies in the region that overwrites it"
            raise CompileError(f"{other.work.label} is needed by a region that cannot wait for it; {WAY_OUT}")
        # The smallest value, as the Run keeps it alive until then.
        value, part = min(other.makes, key=lambda key: types.nbytes(self._type(key)))
        builder = GraphBuilder()
        builder.argument(self._type((value, part)))
        kernel = self._kernels.number(print_module(builder.finish([]), locations=False))
        run = plan_pb2.Run(kernel=kernel, inputs=[self._numbers.value(value, part)], layer=other.work.label)
        made = (self._behind[maker] for maker in self._makers[value, part])
        self._append(region, _latest([self._now[region], *made]), plan_pb2.Instruction(run=run))

    def _append(self, region: int, clock: Clock, instruction: plan_pb2.Instruction) -> None:
        self._plan.regions[region].instructions.append(instruction)
        self._now[region] = (*clock[:region], clock[region] + 1, *clock[region + 1 :])

    def _instruction(self, task: Task) -> plan_pb2.Instruction:
        item = task.work
        instruction = plan_pb2.Instruction()
        match item.kind:
            case WorkKind.RECEIVE:
                assert item.bundle is not None
                instruction.receive.group = item.bundle.id
            case WorkKind.SEND:
                assert item.bundle is not None
                instruction.send.group = item.bundle.id
            case WorkKind.COMMIT:
                (state,) = item.commits.values()
                (key,) = task.reads
                instruction.commit.value = self._number(key)
                instruction.commit.state = self._number((state, SHARED))
            case _:
                run = instruction.run
                run.kernel = self._kernels.number(item.kernel, item.label, item.sources)
                run.inputs.extend(map(self._number, task.reads))
                run.outputs.extend(map(self._number, task.makes))
                if item.commits:
                    states = (item.commits.get(value) for value, _ in task.makes)
                    run.commits.extend(0 if state is None else self._number((state, SHARED)) for state in states)
                run.layer = item.label
                run.micro_batch = max(task.micro_batch, 0)
        return instruction

    def _number(self, key: Key) -> int:
        return self._numbers.value(*key)

    def _type(self, key: Key) -> AnyTensorType:
        return self._built.localiser.type_of(key[0])

    def finish(self, target: Target) -> plan_pb2.PipelinePlan:
        """Completes the pipeline after all tasks have been added."""
        plan = self._plan
        arguments = func_of(self._cut.module).block.args
        for named in self._cut.names.states:
            state = arguments[named.argument]
            plan.states.add(value=self._number((state, SHARED)), name=named.name, type=types.to_proto(state))
        plan.groups.extend(bundle.group for bundle in (self._built.batch, *self._built.sends))
        plan.kernels.extend(self._kernels.messages())
        plan.sources.extend(self._kernels.sources())
        self._add_joined()
        if self._cut.names.wafers is not None:
            wafers = arguments[self._cut.names.wafers]
            plan.number_values.extend(self._numbers.value(wafers, k) for k in range(target.num_parts))
        plan.micro_batches, plan.num_replicas = target.num_parts, target.num_replicas
        _add_drops(plan)
        return plan

    def _add_joined(self) -> None:
        made: dict[SSAValue, None] = {}
        for item in self._built.graph.work:
            if item.is_segment:
                own = self._built.graph.repeated
                made.update((value, None) for value, is_part in item.makes if not is_part and value not in own)
        for value in made:
            self._plan.joined.add(
                value=self._number((value, SHARED)),
                type=types.to_proto(self._type((value, SHARED))),
                reduction=REDUCTIONS[self._cut.sharding.placements[value].reduction or "sum"],
            )


def _latest(clocks: Sequence[Clock]) -> Clock:
    return tuple(map(max, zip(*clocks, strict=True)))


def _add_drops(plan: plan_pb2.PipelinePlan) -> None:
    """Drops each value after its last read, if a single region reads it.

    A value that several regions read has no last reader that is known when the plan is made. States, and values that
    are sent, stay for the step.
    """
    groups = {group.id: group for group in plan.groups}
    readers: dict[int, set[int]] = defaultdict(set)
    kept = {slot.value for slot in plan.states} | set(plan.number_values)
    for number, region in enumerate(plan.regions):
        for instruction in region.instructions:
            for value in instruction.run.inputs:
                readers[value].add(number)
            if instruction.HasField("send"):
                kept.update(member.value for member in groups[instruction.send.group].members)
            if instruction.HasField("commit"):
                kept.add(instruction.commit.value)
    shared = {value for value, regions in readers.items() if len(regions) > 1}
    for region in plan.regions:
        add_drops(region.instructions, kept | shared)
