"""The steps of simulated jobs: outputs and states are functions of the states before, the step and its input.

A wrong recovery therefore shows as a wrong number: no other sequence of steps gives the same states.
"""

import hashlib
from collections.abc import Mapping
from typing import Final

from wsc.v1 import plan_pb2

TRAIN: Final = "train"  # changes the weights
EVALUATE: Final = "evaluate"  # accumulates a metric, and leaves the weights as they are
NO_INPUT: Final = "the loader cannot make this batch"
LOSS: Final = 1  # the value and the group of the output
_NUMBER: Final = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_INT64)

States = dict[str, bytes]


def number(*parts: object) -> bytes:
    """Returns eight bytes that depend on all parts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


def weight(shard: int) -> str:
    return f"weight.{shard}"


def metric(shard: int) -> str:
    return f"metric.{shard}"


def names_of(step: str, num_shards: int) -> list[list[str]]:
    """Returns the names of the states that a step has, by shard."""
    kinds = [weight] if step == TRAIN else [weight, metric]
    return [[kind(shard) for kind in kinds] for shard in range(num_shards)]


def output_of(states: Mapping[str, bytes], data: bytes) -> bytes:
    """Returns the output of a step. data: the batch, of which each wafer has a part."""
    return number("output", sorted(states.items()), data)


def after_step(step: str, states: Mapping[str, bytes], data: bytes) -> States:
    """Returns the states after a step. data: the batch, of which each wafer has a part."""
    changing = "weight" if step == TRAIN else "metric"
    return {name: number(name, value, data) if name.startswith(changing) else value for name, value in states.items()}


def batch(loader: str, position: int) -> bytes:
    """Returns the batch at a position of a loader, from 1, which the workers divide among them."""
    return number("batch", loader, position)


def loader_of(job: str, index: int, bad_step: int) -> str:
    """Returns the name of the loader of an execution. bad_step: whose batch it cannot make; 0: none."""
    return f"{job}-loader-{index}-{bad_step}"


def bad_step_of(loader: str) -> int:
    """Returns the step whose batch a loader cannot make; 0: there is none."""
    return int(loader.rpartition("-")[2])


def plan_of(step: str, num_csx: int, num_shards: int) -> plan_pb2.Plan:
    """Returns the plan of a step, as far as a coordinator reads it."""
    plan = plan_pb2.Plan(format=1, num_csx=num_csx, num_shards=num_shards, batch_rows=num_csx)
    plan.wafer.micro_batches = plan.worker.micro_batches = 1
    for shard, names in enumerate(names_of(step, num_shards)):
        part = plan.memoryx.add(shard=shard)
        for value, name in enumerate(names, 1):
            part.states.add(value=value, name=name, type=_NUMBER)
    group = plan.coordinator.groups.add(id=LOSS, kind=plan_pb2.GROUP_KIND_REDUCTION, nbytes=8)
    group.members.add(value=LOSS, type=_NUMBER, offset=0)
    plan.coordinator.outputs.add(name="loss", type=_NUMBER, group=LOSS, value=LOSS)
    return plan
