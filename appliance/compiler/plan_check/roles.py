"""One role's program, followed step by step: which values it has, of which types."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from xdsl.ir import BlockArgument, Operation, SSAValue

from appliance.compiler.cost.flops import VIEWS
from appliance.compiler.plan_check.errors import require
from cirh.dialect.operations import func_of, return_of
from cirh.dialect.types import TensorInfo, from_proto, info
from cirh.modules.verify import verify
from cirh.text.parser import parse_module
from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True)
class Signature:
    """What a kernel takes and gives."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    views: tuple[int | None, ...]  # the argument that an output is a view of, if it is one


@lru_cache(maxsize=1024)
def signature_of(text: str) -> Signature:
    """Of the kernel that has this text, which is parsed and verified; CirhError if it is none."""
    module = parse_module(text)
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
    """One role's groups and kernels, and the types of the values that it has as its program goes on."""

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
        self._run: set[int] = set()  # kernels
        self.made: set[int] = set()  # values, by kernels
        self.used: set[int] = set()  # values
        self.values: dict[int, TensorInfo] = {}
        self.received: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()

    def receive(self, number: int) -> plan_pb2.Group:
        """Has the group's tensors from here on. What is gathered stays with SwarmX."""
        group = self._group(number)
        self.received[number] += 1
        self.values.update((member.value, from_proto(member.type)) for member in group.members)
        return group

    def send(self, number: int) -> plan_pb2.Group:
        group = self._group(number)
        self.sent[number] += 1
        for member in group.members:
            self.read(member.value, from_proto(member.type))
        return group

    def run(self, run: plan_pb2.Run, joined: Collection[int] = ()) -> Signature:
        """joined: values that may be made again, as what is made is joined to what there is."""
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
            again = value in self.made and value not in joined
            require(value and not again, f"{self.name} makes value {value} again, or one without a number")
            self.made.add(value)
        self.values.update(zip(run.outputs, signature.outputs, strict=True))
        return signature

    def drop(self, run: plan_pb2.Run) -> None:
        for value in run.drops:
            require(self.values.pop(value, None) is not None, f"{self.name} drops value {value}, which it has not")

    def type_of(self, value: int) -> TensorInfo:
        """The type of a value that the role has."""
        require(value in self.values, f"{self.name} reads value {value} before it has it")
        return self.values[value]

    def read(self, value: int, type: TensorInfo) -> None:
        self.used.add(value)
        require(self.type_of(value) == type, f"{self.name} has value {value} with another type than it is read with")

    def finish(self) -> None:
        """Nothing is listed that the program does not use."""
        require(self._run == set(self._kernels), f"{self.name} has kernels that it does not run")
        require(set(self.received) | set(self.sent) == set(self._groups), f"{self.name} has groups that do not travel")

    def _group(self, number: int) -> plan_pb2.Group:
        require(number in self._groups, f"{self.name} has no group {number}")
        return self._groups[number]
