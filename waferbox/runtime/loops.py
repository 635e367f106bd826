"""The loop of a list in a plan: its body is gone through several times in a step."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from wsc.v1 import plan_pb2

Entry = TypeVar("Entry")


def body_of(loop: plan_pb2.Loop) -> range:
    """Returns the positions of the body; empty if there is no loop."""
    return range(loop.begin, loop.end)


def with_times(entries: Sequence[Entry], loop: plan_pb2.Loop) -> Iterator[tuple[Entry, int]]:
    """Yields each entry of a list once, with the number of times that it is gone through in a step."""
    body = body_of(loop)
    for position, entry in enumerate(entries):
        yield entry, loop.times if position in body else 1


def in_order(entries: Sequence[Entry], loop: plan_pb2.Loop) -> Iterator[tuple[Entry, int]]:
    """Yields the entries of a step in order, each with the number of its repetition, which is 0 outside of the body."""
    body = body_of(loop)
    for entry in entries[: body.start]:
        yield entry, 0
    repeated = entries[body.start : body.stop]
    for repetition in range(loop.times):
        for entry in repeated:
            yield entry, repetition
    for entry in entries[body.stop :]:
        yield entry, 0


def position_in_step(position: int, loop: plan_pb2.Loop) -> int:
    """Returns the position of an entry among all of a step; that of its first repetition if it has several."""
    body = body_of(loop)
    return position + (loop.times - 1) * len(body) if position >= body.stop and body else position
