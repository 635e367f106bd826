"""Checks the program of one role, and that each group is sent as it is received."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from xdsl.ir import BlockArgument, Operation, SSAValue

from appliance.compiler.cost.flops import VIEWS
from waferbox.cirh.dialect.operations import func_of, return_of
from waferbox.cirh.dialect.types import TensorInfo, from_proto, info
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import shared_module
from waferbox.links.elements import aligned, tensor_bytes
from waferbox.links.frame import INLINE_BYTES
from waferbox.runtime.arena import is_in_arena
from wsc.v1 import plan_pb2

# --- Errors -----------------------------------------------------------------------------------------------------------


class PlanError(ValueError):
    """Raised for an inconsistent plan; the message says where."""


def require(holds: object, problem: str) -> None:
    """Raises PlanError with this problem unless the condition holds."""
    if not holds:
        raise PlanError(problem)


# --- Programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Signature:
    """The types of a kernel's arguments and results.

    Attributes:
        inputs: types of its arguments.
        outputs: types of its results.
        views: by result, the argument that it is a view of; None if it is not.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    views: tuple[int | None, ...]


@lru_cache(maxsize=1024)
def signature_of(text: str) -> Signature:
    """The signature of the kernel with this text, which is parsed and verified. Raises CirhError if it is invalid."""
    module = shared_module(text)
    verify(module)
    return Signature(
        tuple(info(argument) for argument in func_of(module).block.args),
        tuple(info(value) for value in return_of(module).operands),
        tuple(_viewed(value) for value in return_of(module).operands),
    )


def _viewed(value: SSAValue) -> int | None:
    while isinstance(value.owner, Operation):
        if value.owner.name not in VIEWS:
            return None
        value = value.owner.operands[0]
    assert isinstance(value, BlockArgument)
    return value.index


class Role:
    """A role's groups and kernels, and the types of the values that it has while its program is followed."""

    def __init__(
        self,
        name: str,
        groups: Sequence[plan_pb2.Group],
        kernels: Sequence[plan_pb2.Kernel],
    ) -> None:
        self.name = name
        self._groups = {group.id: group for group in groups}
        self._kernels = {kernel.id: signature_of(kernel.cirh) for kernel in kernels}
        require(len(self._groups) == len(groups) and len(self._kernels) == len(kernels), f"{name} has a number twice")
        self._run: set[int] = set()  # kernels that are run
        self.made: set[int] = set()  # values that kernels make
        self._makers: dict[int, plan_pb2.Run] = {}  # by value: the run that made it first
        self.used: set[int] = set()  # values that are read
        self.values: dict[int, TensorInfo] = {}
        self.received: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()
        self.times = 1  # that the program goes through the present instruction in a step

    def receive(self, number: int) -> plan_pb2.Group:
        """Receives a group: the role has its tensors from now on."""
        group = self.group(number)
        self.received[number] += self.times
        self.values.update((member.value, from_proto(member.type)) for member in group.members)
        return group

    def send(self, number: int) -> plan_pb2.Group:
        group = self.group(number)
        self.sent[number] += self.times
        for member in group.members:
            self.read(member.value, from_proto(member.type))
        return group

    def run(self, run: plan_pb2.Run, joined: Collection[int] = ()) -> Signature:
        """Runs a kernel.

        joined: values that may be made several times, as their parts are joined. Others may be made again, once they
            have been dropped, by the same run or by one that makes fewer values of the same inputs or fewer.
        """
        require(run.kernel in self._kernels, f"{self.name} has no kernel {run.kernel}")
        signature = self._kernels[run.kernel]
        self._run.add(run.kernel)
        require(
            (len(run.inputs), len(run.outputs)) == (len(signature.inputs), len(signature.outputs)),
            f"{self.name}: kernel {run.kernel} is given other numbers of tensors than it has",
        )
        for value, type in zip(run.inputs, signature.inputs, strict=True):
            self.read(value, type)
        for value in run.outputs:
            maker = self._makers.setdefault(value, run)
            is_repeated = value not in self.values and self._repeats(run, maker)
            again = value in self.made and value not in joined and not is_repeated
            require(value and not again, f"{self.name} makes value {value} again, or one without a number")
            self.made.add(value)
        self.values.update(zip(run.outputs, signature.outputs, strict=True))
        return signature

    def _repeats(self, run: plan_pb2.Run, first: plan_pb2.Run) -> bool:
        """Whether a run makes what an earlier one has made, or a part of it."""
        if run is first or run.micro_batch != first.micro_batch:
            return False
        if (run.kernel, run.inputs, run.outputs) == (first.kernel, first.inputs, first.outputs):
            return True
        types = dict(zip(first.outputs, self._kernels[first.kernel].outputs, strict=True))
        made = zip(run.outputs, self._kernels[run.kernel].outputs, strict=True)
        is_part = len(run.outputs) < len(first.outputs) and set(run.inputs) <= set(first.inputs)
        return is_part and all(types.get(value) == type for value, type in made)

    def drop(self, run: plan_pb2.Run) -> None:
        for position in run.overwritten:
            is_free = position < len(run.inputs) and run.inputs[position] in run.drops
            require(is_free, f"{self.name} writes over input {position} of kernel {run.kernel}, which it does not drop")
        for value in run.drops:
            require(self.values.pop(value, None) is not None, f"{self.name} drops value {value}, which it has not")

    def type_of(self, value: int) -> TensorInfo:
        """The type of a value; PlanError if the role does not have it."""
        require(value in self.values, f"{self.name} reads value {value} before it has it")
        return self.values[value]

    def read(self, value: int, type: TensorInfo) -> None:
        self.used.add(value)
        require(self.type_of(value) == type, f"{self.name} has value {value} with another type than it is read with")

    def finish(self) -> None:
        """Checks that the program uses all its kernels and groups."""
        require(self._run == set(self._kernels), f"{self.name} has kernels that it does not run")
        require(set(self.received) | set(self.sent) == set(self._groups), f"{self.name} has groups that do not travel")

    def group(self, number: int) -> plan_pb2.Group:
        """The group with this number; PlanError if the role has none."""
        require(number in self._groups, f"{self.name} has no group {number}")
        return self._groups[number]


# --- Groups -----------------------------------------------------------------------------------------------------------


class Groups:
    """All groups of a plan. Roles that list the same number must mean the same group."""

    def __init__(self, plan: plan_pb2.Plan) -> None:
        self.by_id: dict[int, plan_pb2.Group] = {}
        lists = [plan.wafer.groups, plan.swarmx.groups, [plan.worker.batch], plan.coordinator.groups]
        for group in (group for groups in (*lists, *(part.groups for part in plan.memoryx)) for group in groups):
            known = self.by_id.setdefault(group.id, group)
            if known is group:
                _check_group(plan, group)
            require(known == group, f"group {group.id} is not the same everywhere")

    def check_traffic(self, plan: plan_pb2.Plan, wafer: Role, shards: Sequence[Role]) -> None:
        """Checks that each group is sent as often as it is received, by the right roles."""
        passed: Counter[int] = Counter()
        used = {value for shard in shards for value in shard.used}
        for number, group in self.by_id.items():
            sent = {shard: role.sent[number] for shard, role in enumerate(shards) if role.sent[number]}
            received = {shard: role.received[number] for shard, role in enumerate(shards) if role.received[number]}
            match group.kind:
                case plan_pb2.GROUP_KIND_BATCH:
                    fits = not sent and not received and wafer.received[number] == 1 and not wafer.sent[number]
                    require(group == plan.worker.batch, f"group {number} is another batch than that of the workers")
                case plan_pb2.GROUP_KIND_WEIGHTS:
                    times = passed[number] = wafer.received[number]
                    fits = times > 0 and sent == {group.source_shard: times} and not received
                case plan_pb2.GROUP_KIND_REDUCTION:
                    # What is sent several times in a step is copied, or written again when it was released.
                    times = passed[number] = wafer.sent[number]
                    back = times if group.to_wafers else 0
                    fits = times == 1 or (times > 1 and (group.nbytes <= INLINE_BYTES or is_in_arena(group)))
                    fits = fits and wafer.received[number] == back and not sent
                    fits = fits and received == dict.fromkeys(group.shards, times)
                    if not group.to_wafers and not group.to_coordinator:
                        fits = fits and used.issuperset(member.value for member in group.members)
                case plan_pb2.GROUP_KIND_OUTPUT:
                    fits = sent == {0: 1} and not received and not wafer.received[number]
                case _:
                    fits = sent == {group.source_shard: 1} and received == dict.fromkeys(group.shards, 1)
            require(fits, f"group {number} is not sent as it is received")
        listed = [group.id for group in plan.swarmx.groups]
        counted = len(listed) == len(passed) and len(listed) == len(plan.swarmx.times)
        counted = counted and dict(zip(listed, plan.swarmx.times, strict=True)) == passed
        require(counted, "SwarmX lists other groups than those that pass through it")
        require(plan.worker.batch.kind == plan_pb2.GROUP_KIND_BATCH, "the workers' group is no batch")


def _check_group(plan: plan_pb2.Plan, group: plan_pb2.Group) -> None:
    what = f"group {group.id}"
    require(group.id > 0, f"{what} has no number")
    reduction = group.kind == plan_pb2.GROUP_KIND_REDUCTION
    exchange = group.kind == plan_pb2.GROUP_KIND_EXCHANGE
    require(group.kind in plan_pb2.GroupKind.values() and group.kind, f"{what} is of no kind")
    require(group.reduction in plan_pb2.Reduction.values(), f"{what} is reduced in an unknown way")
    require(reduction == (group.reduction != plan_pb2.REDUCTION_UNSPECIFIED), f"{what} is reduced, and should not be")
    require(reduction or not (group.to_wafers or group.to_coordinator), f"{what} goes where its kind does not")
    num_parts = plan.num_csx * plan.wafer.micro_batches
    require(not group.to_wafers or num_parts > 1, f"{what} goes back to the wafer that has the whole batch")
    require(reduction or exchange or not group.shards, f"{what} goes to shards, which its kind does not")
    require(reduction is False or group.source_shard == 0, f"{what} comes from a shard")
    require(group.source_shard < plan.num_shards, f"{what} comes from a shard that is not there")
    ordered = all(before < after for before, after in pairwise(group.shards))
    require(ordered and all(shard < plan.num_shards for shard in group.shards), f"{what} goes to no such shards")
    require(not exchange or (group.shards and group.source_shard not in group.shards), f"{what} is no exchange")
    goes_somewhere = group.shards or group.to_wafers or group.to_coordinator
    require(not reduction or goes_somewhere, f"{what} goes nowhere")
    check_members(group, what, plan.num_csx, plan.wafer.micro_batches)


def check_members(group: plan_pb2.Group, what: str, num_csx: int, micro_batches: int) -> None:
    """Checks that the members of a group are consecutive, with a part for each micro-batch if it is gathered."""
    gathered = group.reduction == plan_pb2.REDUCTION_GATHER
    end = 0
    for member in group.members:
        begin = end if gathered else aligned(end)
        require(member.offset == begin, f"{what}: a member does not follow the one before")
        end = member.offset + tensor_bytes(member.type)
    parts = len(group.members) == micro_batches
    alike = all(member.type == group.members[0].type for member in group.members)
    require(not gathered or (parts and alike), f"{what} does not have a part for each micro-batch, all of one type")
    require(group.nbytes == end * (num_csx if gathered else 1), f"{what} is not as large as its members")
    values = [member.value for member in group.members]
    require(0 not in values and len(set(values)) == len(values), f"{what} has a value twice, or one without number")
    kinds = {member.type.element_type for member in group.members}
    require(not group.reduction or len(kinds) == 1, f"{what} mixes element types")
