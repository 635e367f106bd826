"""The flows of groups between spans of a trace: each from the span that sent a group to the one that received it."""

import itertools
from collections.abc import Sequence

from trace_arrows import arrows

from waferbox.commands.group_flows import flows
from waferbox.commands.trace import chrome_trace
from wsc.v1.observation_pb2 import Span

Ends = list[tuple[str, float, str, float]]


def span(node: str, what: str, begin: float, *, group: int = 1, source: str = "", step: int = 3) -> Span:
    return Span(node=node, what=what, detail="fc", step=step, begin=begin, seconds=0.5, group=group, source=source)


def found(spans: Sequence[Span]) -> Ends:
    """The flows by nodes and begins, in the order of their ends."""
    ordered = sorted(spans, key=lambda span: span.begin)
    ends = [(one.sender.node, one.sender.begin, one.receiver.node, one.receiver.begin) for one in flows(ordered)]
    return sorted(ends, key=lambda end: (end[3], end[2]))


def test_weights_go_to_every_wafer() -> None:
    spans = [
        span("memoryx-0", "send", 1),
        span("swarmx-0", "broadcast", 2, source="memoryx-0"),
        span("wafer-0", "wait", 3, source="swarmx-0"),
        span("wafer-1", "wait", 4, source="swarmx-0"),
    ]
    assert found(spans) == [
        ("memoryx-0", 1, "swarmx-0", 2),
        ("swarmx-0", 2, "wafer-0", 3),
        ("swarmx-0", 2, "wafer-1", 4),
    ]


def test_the_last_gradient_is_followed_by_the_sum() -> None:
    spans = [
        span("wafer-0", "send", 1),
        span("wafer-1", "send", 2),
        span("swarmx-0", "reduce", 3, source="wafer-1"),
        span("swarmx-0", "reduce", 4, source="wafer-0"),
        span("memoryx-1", "wait", 5, source="swarmx-0"),
    ]
    assert found(spans) == [
        ("wafer-1", 2, "swarmx-0", 3),
        ("wafer-0", 1, "swarmx-0", 4),
        ("swarmx-0", 4, "memoryx-1", 5),
    ]


def test_a_sum_goes_up_a_tree_and_down_again() -> None:
    spans = [
        *(span(f"wafer-{number}", "send", 1) for number in (0, 1)),
        *(span(f"swarmx-{number + 1}", "reduce", 2, source=f"wafer-{number}") for number in (0, 1)),
        span("swarmx-0", "reduce", 3, source="swarmx-1"),
        span("swarmx-0", "reduce", 3.25, source="swarmx-2"),
        *(span(f"swarmx-{number + 1}", "broadcast", 4, source="swarmx-0") for number in (0, 1)),
        *(span(f"wafer-{number}", "wait", 5, source=f"swarmx-{number + 1}") for number in (0, 1)),
    ]
    assert found(spans) == [
        ("wafer-0", 1, "swarmx-1", 2),
        ("wafer-1", 1, "swarmx-2", 2),
        ("swarmx-1", 2, "swarmx-0", 3),
        ("swarmx-2", 2, "swarmx-0", 3.25),
        ("swarmx-0", 3.25, "swarmx-1", 4),
        ("swarmx-0", 3.25, "swarmx-2", 4),
        ("swarmx-1", 4, "wafer-0", 5),
        ("swarmx-2", 4, "wafer-1", 5),
    ]


def test_repetitions_steps_and_groups_are_not_confused() -> None:
    sends = [span("memoryx-0", "send", begin, step=step) for step, begin in ((1, 1), (1, 2), (2, 3))]
    takes = [
        span("memoryx-1", "wait", begin, step=step, source="memoryx-0") for step, begin in ((1, 4), (1, 5), (2, 6))
    ]
    other = [span("memoryx-0", "send", 2.5, group=2), span("memoryx-1", "wait", 7, group=2, source="memoryx-0")]
    assert found([*sends, *takes, *other]) == [
        ("memoryx-0", 1, "memoryx-1", 4),
        ("memoryx-0", 2, "memoryx-1", 5),
        ("memoryx-0", 3, "memoryx-1", 6),
        ("memoryx-0", 2.5, "memoryx-1", 7),
    ]


def test_what_has_no_other_end_or_came_before_it_was_sent_has_no_flow() -> None:
    assert found([span("memoryx-0", "send", 1), span("wafer-0", "wait", 2, source="worker-0")]) == []
    assert found([span("memoryx-0", "send", 9), span("memoryx-1", "wait", 2, source="memoryx-0")]) == []
    assert found([Span(node="a", what="send", step=3), Span(node="b", what="wait", step=3, source="a")]) == []


def test_an_arrow_begins_and_ends_in_its_spans() -> None:
    spans = [
        span("memoryx-0", "send", 1),
        span("swarmx-0", "broadcast", 1.25, source="memoryx-0"),
        span("wafer-0", "wait", 0.9, source="swarmx-0"),
    ]
    made = arrows(chrome_trace(spans)["traceEvents"])
    assert [(arrow.sender, arrow.receiver) for arrow in made] == [("memoryx-0", "swarmx-0"), ("swarmx-0", "wafer-0")]
    assert all(one.begin <= other.begin for one, other in itertools.pairwise(made))
