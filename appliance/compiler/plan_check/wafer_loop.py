"""Checks the loop of a wafer's program: that all repetitions can do what the first does."""

from collections import Counter
from collections.abc import Mapping

from appliance.compiler.plan_check.roles import PlanError, Role, require
from waferbox.cirh.dialect.types import TensorInfo
from waferbox.runtime.loops import body_of
from wsc.v1 import plan_pb2


class WaferLoop:
    """Checks that the further repetitions of a wafer's loop can do what the first does, which is followed."""

    def __init__(self, plan: plan_pb2.WaferPlan, role: Role, parts: dict[int, int], made: Counter[int]) -> None:
        """parts: the micro-batch of each value. made: by joined value, the number of its parts."""
        self._plan, self._role, self._parts, self._made = plan, role, parts, made
        self._body, self._looped = body_of(plan.loop), frozenset(plan.looped_parts)
        rounds = plan.micro_batches // plan.micro_batches_at_once
        is_loop = 0 < plan.loop.begin < plan.loop.end < len(plan.instructions) and plan.loop.times == rounds - 2
        require(not plan.HasField("loop") or is_loop, "the wafer's loop does not have all rounds but two")
        require(self._body or not self._looped, "the wafer has parts of a loop, and no loop")
        self._found: Mapping[int, TensorInfo] = {}  # the values that are there when the loop begins
        self._made_before: Mapping[int, int] = {}
        self._sent_before: Mapping[int, int] = {}

    def reach(self, position: int) -> None:
        """Called before each instruction of the program."""
        if self._body and position == self._body.start:
            self._role.times = self._plan.loop.times
            self._found, self._made_before = dict(self._role.values), dict(self._made)
            self._sent_before = dict(self._role.sent)
        if self._body and position == self._body.stop:
            self._role.times = 1
            lost = [v for v, type in self._found.items() if v not in self._looped and self._role.values.get(v) != type]
            require(not lost, "a repetition of the wafer's loop does not leave the values that it finds")
            for value in self._looped:
                self._repeat(value)
            self._add_up()

    def check_run(self, run: plan_pb2.Run) -> None:
        """Checks a run, which may be in the loop."""
        if self._role.times > 1:
            inside = run.micro_batch // self._plan.micro_batches_at_once == 1
            require(inside, "the first repetition of the wafer's loop is not the second round")
            others = [v for v in run.inputs if v in self._parts and v in self._found and v not in self._looped]
            require(not others, "all repetitions of the wafer's loop read the part of one micro-batch")

    def _repeat(self, value: int) -> None:
        """Does with the parts of further repetitions what the first has done with its own."""
        values, used, made = self._role.values, self._role.used, self._role.made
        micro_batch, found, left = self._parts.get(value), self._found.get(value), values.get(value)
        if micro_batch is None:
            raise PlanError(f"value {value} of the wafer's loop is no part of a micro-batch")
        for repetition in range(1, self._plan.loop.times):
            step = repetition * self._plan.micro_batches_at_once
            other = value + step
            there = self._found.get(other) == found and self._parts.get(other, micro_batch + step) == micro_batch + step
            require(there, f"value {other} is not the part of the wafer's loop that value {value} is")
            self._parts[other] = micro_batch + step
            if left is None:
                values.pop(other, None)
            else:
                values[other] = left
            used.update([other] if value in used else ())
            made.update([other] if value in made else ())

    def _add_up(self) -> None:
        """Counts the parts that all repetitions add to joined values; those of one round leave the wafer in it."""
        groups = {group.id: group for group in self._plan.groups}
        sent = {number for number, times in self._role.sent.items() if times > self._sent_before.get(number, 0)}
        leaving = {member.value for number in sent for member in groups[number].members}
        for value, count in self._made.items():
            added = count - self._made_before.get(value, 0)
            if added and value in self._made_before:
                self._made[value] += added * (self._plan.loop.times - 1)
            elif added:
                require(value in leaving, f"value {value} is made anew in each repetition, and stays on the wafer")
