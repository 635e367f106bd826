"""The arrows (flows) in a file of the Trace Event Format, with what each viewer needs of them checked."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """An arrow between two nodes: their names, the activities and the steps of its ends, and its times."""

    name: str
    sender: str
    sends: str
    receiver: str
    receives: str
    steps: tuple[int, int]
    begin: float
    end: float


def arrows(events: Iterable[Event]) -> list[Arrow]:
    """Returns all arrows by their numbers: each has one begin and one end, in spans of two nodes, and in this order."""
    events = list(events)
    nodes = {event["pid"]: str(event["args"]["name"]) for event in events if event["name"] == "process_name"}
    spans: dict[tuple[int, int], list[Event]] = defaultdict(list)
    ends: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
        elif event["ph"] != "M":
            ends[event["id"]].append(event)

    def around(end: Event) -> Event:
        """The span in which the end of an arrow lies; the later one, where two meet."""
        *_, last = (
            span
            for span in spans[end["pid"], end["tid"]]
            if span["ts"] <= end["ts"] <= span["ts"] + span["dur"] and span["cat"] != "step"
        )
        return last

    made = []
    for number in sorted(ends):
        begin, end = ends[number]
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        assert begin["pid"] != end["pid"]
        assert begin["ts"] <= end["ts"]
        sends, receives = around(begin), around(end)
        made.append(
            Arrow(
                name=begin["name"],
                sender=nodes[begin["pid"]],
                sends=sends["name"],
                receiver=nodes[end["pid"]],
                receives=receives["name"],
                steps=(sends["args"]["step"], receives["args"]["step"]),
                begin=begin["ts"],
                end=end["ts"],
            )
        )
    return made
