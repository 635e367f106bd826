"""The ways of groups from node to node in a trace: which span sent the group that another span received."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from wsc.v1.observation_pb2 import Span

_SEND = "send"  # of all roles but SwarmX
_BROADCAST, _REDUCE = "broadcast", "reduce"  # of SwarmX: a group from above, and one from below


class Flow(NamedTuple):
    """The way of one group from one node to the next; the spans are those of its begin and its end."""

    sender: Span
    receiver: Span


def flows(spans: Iterable[Span]) -> list[Flow]:
    """Returns the flows between the spans, in the order of their begin, as the spans are.

    Groups without a recorded sender have none. Nor have those that would be received before they are sent, because the
    clocks of two hosts differ.
    """
    sent: dict[tuple[str, int, int, str], list[Span]] = defaultdict(list)  # by node, group, step and activity
    received: dict[tuple[str, str, int, int, str], list[Span]] = defaultdict(list)  # by source too
    for span in spans:
        if not span.HasField("group"):
            continue
        if span.what in (_SEND, _BROADCAST, _REDUCE):
            sent[span.node, span.group, span.step, span.what].append(span)
        if span.source:
            received[span.source, span.node, span.group, span.step, span.what].append(span)
    found: list[Flow] = []
    for (source, _, group, step, what), receivers in received.items():
        # A group goes up only from SwarmX to SwarmX and to MemoryX, which gets nothing from above.
        from_above = sent.get((source, group, step, _BROADCAST), []) if what != _REDUCE else []
        senders = sent.get((source, group, step, _SEND)) or from_above or sent.get((source, group, step, _REDUCE), [])
        # Frames arrive in the order of sending. SwarmX receives one from each child before it sends their sum.
        each, rest = divmod(len(senders), len(receivers))
        if each and not rest:
            found += map(Flow, senders[each - 1 :: each], receivers)
    in_order = [flow for flow in found if flow.sender.begin <= flow.receiver.begin + flow.receiver.seconds]
    return sorted(in_order, key=lambda flow: flow.sender.begin)
