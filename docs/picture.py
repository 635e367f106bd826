"""Draws docs/images/architecture.svg: the roles of a job, and what travels between them. `python docs/picture.py`.

Every name in it is the code's own: roles, links, groups and calls are looked up in the protocol, and links are those
that the coordinator opens for a job. A name that is gone, or a link that is not drawn, stops the script.
"""

from collections.abc import Iterator
from html import escape
from itertools import chain, product
from pathlib import Path
from typing import Final

from appliance.coordinator.nodes.topology import COORDINATOR, Topology
from waferbox.roles import role_of
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, plan_pb2

FILE: Final = Path(__file__).parent / "images" / "architecture.svg"
WIDTH, HEIGHT = 1180, 596

COLOURS: Final = {  # in light and in dark
    "control": ("#8b8f98", "#7f8794"),
    "weights": ("#1d5fd1", "#79aeff"),
    "reduction": ("#b8480c", "#ff9d5c"),
    "batch": ("#1a7f37", "#5fd07a"),
    "output": ("#7a3fd0", "#c39bff"),
    "paper": ("#fbfaf7", "#14171d"),
    "card": ("#ffffff", "#1d2129"),
    "edge": ("#d3d1c9", "#3a404b"),
    "ink": ("#20242c", "#e8eaee"),
    "soft": ("#666b75", "#a2a8b4"),
}
LINES: Final = ("control", "weights", "reduction", "batch", "output")
STYLE: Final = """
  text { font-family: ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px;
         fill: var(--soft); }
  .paper { fill: var(--paper); stroke: var(--edge); }
  .group { fill: none; stroke: var(--edge); stroke-width: 1.5; stroke-dasharray: 5 5; }
  .card { fill: var(--card); stroke: var(--edge); stroke-width: 1.5; }
  .role { font-size: 18px; font-weight: 650; fill: var(--ink); }
  .code { font-family: ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; font-size: 12px; }
  .end { font-size: 11px; }
  .middle { text-anchor: middle; }
  .right { text-anchor: end; }
  .ink { fill: var(--ink); font-size: 12.5px; }
  .line { fill: none; stroke-width: 1.5; }
  .data { fill: none; stroke-width: 4; }
  .number { fill: var(--ink); }
  .digit { fill: var(--card); font-size: 12px; font-weight: 700; text-anchor: middle; }
"""

_SERVICES: Final = {
    name: service
    for file in (coordinator_pb2, management_pb2, node_pb2)
    for name, service in file.DESCRIPTOR.services_by_name.items()
}

# What the coordinator says on an Attach stream, as the picture shows it.
COMMANDS: Final = [
    message.name
    for name in ("load", "start", "stop")
    if (message := node_pb2.AttachRequest.DESCRIPTOR.fields_by_name[name].message_type) is not None
]

# Between which members of a job there are links, and what each end calls the other.
LINKS: Final = {
    ("swarmx", "SHARD", "memoryx", "SWARMX"),
    ("memoryx", "SHARD", "memoryx", "SHARD"),
    ("wafer", "PARENT", "swarmx", "CHILD"),
    ("worker", "WAFER", "wafer", "WORKER"),
    ("swarmx", "COORDINATOR", "coordinator", "SWARMX"),
    ("memoryx", "COORDINATOR", "coordinator", "SHARD"),
}


def role(number: "node_pb2.Role.ValueType") -> str:
    """What a node of this role is called in a job."""
    return role_of(number).name


def purpose(number: "node_pb2.LinkPurpose.ValueType") -> str:
    return node_pb2.LinkPurpose.Name(number).removeprefix("LINK_PURPOSE_")


def group(number: "plan_pb2.GroupKind.ValueType") -> str:
    return plan_pb2.GroupKind.Name(number).removeprefix("GROUP_KIND_")


def calls(service: str, *methods: str) -> str:
    """Calls of a service, which must exist."""
    return f"{service}: {', '.join(_SERVICES[service].methods_by_name[method].name for method in methods)}"


def links_of_a_job() -> set[tuple[str, str, str, str]]:
    """Who dials whom, as LINKS has it, in a job with two of each role but SwarmX."""
    counts = {node_pb2.ROLE_MEMORYX: 2, node_pb2.ROLE_SWARMX: 1, node_pb2.ROLE_WAFER: 2, node_pb2.ROLE_WORKER: 2}
    nodes = [management_pb2.NodeInfo(role=number) for number, count in counts.items() for _ in range(count)]
    topology = Topology.build(nodes, num_workers_per_wafer=1)
    names = [member.name for member in topology.members()]
    specs = topology.links({name: node_pb2.LinkEndpoint() for name in [*names, COORDINATOR]})
    ends = {spec.token: (name, spec) for name, own in specs.items() for spec in own if not spec.dial}
    found = set()
    for name, own in specs.items():
        for spec in own:
            if spec.dial:
                waiter, its = ends[spec.token]
                found.add((_kind(name), purpose(spec.purpose), _kind(waiter), purpose(its.purpose)))
    return found


def _kind(member: str) -> str:
    return member.rpartition("-")[0] or member


def _text(x: float, y: float, text: str, *classes: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{" ".join(classes)}">{escape(text)}</text>'


def _arrow(points: str, colour: str, kind: str = "line") -> str:
    """A path that ends in an arrow head. points: as in SVG."""
    return f'<path d="{points}" class="{kind} {colour}" marker-end="url(#{colour}-{kind})"/>'


def _number(x: float, y: float, number: int) -> str:
    """The number of a step in docs/architecture.md."""
    return f'<circle class="number" cx="{x}" cy="{y}" r="10"/><text class="digit" x="{x}" y="{y + 4}">{number}</text>'


def _card(x: float, y: float, height: float, name: str, lines: tuple[str, ...], copies: int = 1) -> Iterator[str]:
    """A role; copies: how many cards lie on each other."""
    for copy in reversed(range(copies)):
        place = f'x="{x + 6 * copy}" y="{y - 6 * copy}"'
        yield f'<rect class="card" {place} width="{CARD}" height="{height}" rx="10"/>'
    yield _text(x + 14, y + 28, name, "role")
    for number, line in enumerate(lines):
        yield _text(x + 14, y + 50 + 18 * number, line, "code" if number == 0 else "plain")


CARD, GAP = 184, 112
TOP, ROW = 70, 322  # where the cards of the control plane begin, and those of the nodes
MEMORYX, SWARMX, WAFER, WORKER = (56 + i * (CARD + GAP) for i in range(4))
SCRIPT, MIDDLE, MANAGEMENT = MEMORYX, (SWARMX + WAFER) / 2, WORKER
TALL, LOW = 172, 86  # of the cards
FRAME = 248  # where the frame around the nodes begins


def _cards() -> Iterator[str]:
    yield from _card(SCRIPT, TOP, LOW, "your script", ("client/cstorch", "traced step, closures"))
    yield from _card(MIDDLE, TOP, LOW, COORDINATOR, ("appliance/coordinator", "compiler, job, outputs"))
    yield from _card(MANAGEMENT, TOP, LOW, "management", ("python -m appliance", "nodes, leases, queue"))
    yield f'<rect class="group" x="24" y="{FRAME}" width="{WIDTH - 48}" height="{HEIGHT - FRAME - 24}" rx="14"/>'
    for x, number, command, lines, copies in (
        (MEMORYX, node_pb2.ROLE_MEMORYX, "memoryx", ("weights, optimizer", "state: all that", "outlives a step"), 3),
        (SWARMX, node_pb2.ROLE_SWARMX, "swarmx", ("nothing between", "steps; a tree of them"), 1),
        (WAFER, node_pb2.ROLE_WAFER, "wafer", ("activations of", "one batch"), 3),
        (WORKER, node_pb2.ROLE_WORKER, "workers", ("your input_fn, in a", "process of its own"), 3),
    ):
        yield from _card(x, ROW, TALL, role(number), (f"python -m {command}", *lines), copies)
    for x, numbers, what in (
        (MEMORYX, (2, 6, 7), "send, update"),
        (SWARMX, (3, 5), "pass on, add"),
        (WAFER, (4,), "forward, backward"),
        (WORKER, (1,), "a batch"),
    ):
        for position, step in enumerate(numbers):
            yield _number(x + 24 + 24 * position, ROW + TALL - 22, step)
        yield _text(x + 18 + 24 * len(numbers), ROW + TALL - 17, what, "ink")


def _control() -> Iterator[str]:
    """Who asks whom for what, before and after the steps."""
    line = TOP + 48
    yield _arrow(
        f"M {SCRIPT + 84} {TOP} C {SCRIPT + 130} 16, {MANAGEMENT + 40} 16, {MANAGEMENT + 80} {TOP - 6}", "control"
    )
    yield _text(WIDTH / 2, 20, calls("Management", "CreateJob"), "middle")
    for begin, end, texts in (
        (SCRIPT + CARD, MIDDLE, ("Coordinator", "Session", "Compile", "Execute")),
        (MIDDLE + CARD, MANAGEMENT, ("Management", "Coordinate")),
    ):
        yield _arrow(f"M {begin} {line} H {end - 7}", "control")
        service, _, methods = calls(*texts).partition(": ")
        yield _text((begin + end) / 2, line - 10, service, "middle")
        yield _text((begin + end) / 2, line + 22, methods, "middle")
    yield _arrow(f"M {MIDDLE + 126} {TOP + LOW} V {FRAME - 7}", "control")
    yield _text(MIDDLE + 138, TOP + LOW + 42, calls("NodeService", "Attach"))
    yield _text(MIDDLE + 138, TOP + LOW + 60, f"to every node: {', '.join(COMMANDS)}")
    yield _arrow(f"M {MANAGEMENT + 84} {FRAME} V {TOP + LOW + 7}", "control")
    yield _text(MANAGEMENT + 94, TOP + LOW + 42, "Management:")
    yield _text(MANAGEMENT + 94, TOP + LOW + 60, calls("Management", "Register").partition(": ")[2])
    yield _arrow(f"M {SCRIPT + 30} {TOP + LOW} V {ROW - 20}", "control")
    yield _text(SCRIPT + 42, TOP + LOW + 42, calls("StateService", "ReadState", "WriteState"))
    yield _text(SCRIPT + 42, TOP + LOW + 60, calls("StateService", "InitialiseStates").partition(": ")[2])


def _outputs() -> Iterator[str]:
    """What leaves the steps for the script."""
    end = TOP + LOW + 8
    left, right = MIDDLE + 40, MIDDLE + 76
    yield _arrow(f"M {MEMORYX + 140} {ROW - 14} C {MEMORYX + 150} 280, {left} 320, {left} {end}", "output")
    yield _arrow(f"M {SWARMX + 110} {ROW} C {SWARMX + 110} 276, {right} 290, {right} {end}", "output")
    yield _text(MEMORYX + CARD + 40, 270, group(plan_pb2.GROUP_KIND_OUTPUT), "middle", "output-text")
    yield _text(SWARMX + 158, 292, group(plan_pb2.GROUP_KIND_REDUCTION), "output-text")
    yield _number(MIDDLE + 58, TOP + LOW + 34, 8)


def _data() -> Iterator[str]:
    """What goes round in every step. The small words: what each end calls the link."""
    down, up = ROW + 50, ROW + 116
    for left, right, ends in (
        (MEMORYX, SWARMX, (node_pb2.LINK_PURPOSE_SWARMX, node_pb2.LINK_PURPOSE_SHARD)),
        (SWARMX, WAFER, (node_pb2.LINK_PURPOSE_CHILD, node_pb2.LINK_PURPOSE_PARENT)),
    ):
        begin, end = left + CARD + (12 if left == MEMORYX else 0), right
        yield _arrow(f"M {begin} {down} H {end - 12}", "weights", "data")
        yield _text((begin + end) / 2, down - 12, group(plan_pb2.GROUP_KIND_WEIGHTS), "middle", "weights-text")
        yield _arrow(f"M {end} {up} H {begin + 12}", "reduction", "data")
        yield _text((begin + end) / 2, up + 24, group(plan_pb2.GROUP_KIND_REDUCTION), "middle", "reduction-text")
        yield _text(begin + 5, (down + up) / 2 - 4, purpose(ends[0]), "end")
        yield _text(end - 5, (down + up) / 2 + 14, purpose(ends[1]), "end", "right")
    begin, end = WAFER + CARD + 12, WORKER
    yield _arrow(f"M {end} {down} H {begin + 12}", "batch", "data")
    yield _text((begin + end) / 2, down - 12, group(plan_pb2.GROUP_KIND_BATCH), "middle", "batch-text")
    yield _text(begin + 5, down + 24, purpose(node_pb2.LINK_PURPOSE_WORKER), "end")
    yield _text(end - 5, down + 42, purpose(node_pb2.LINK_PURPOSE_WAFER), "end", "right")
    bottom = ROW + TALL
    left, right = MEMORYX + 44, MEMORYX + 104
    yield _arrow(f"M {left} {bottom} C {left} {bottom + 40}, {right} {bottom + 40}, {right} {bottom + 8}", "weights")
    shard = purpose(node_pb2.LINK_PURPOSE_SHARD)
    told = "numbers: docs/architecture.md, the step. Links: shared memory within a host, gRPC between hosts"
    yield _text(WIDTH - 44, bottom + 62, told, "end", "right")
    yield _text(right + 14, bottom + 30, group(plan_pb2.GROUP_KIND_EXCHANGE), "weights-text")
    yield _text(right + 100, bottom + 30, f"{shard} to {shard}: norms, for clipping", "end")


def _style() -> str:
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    rules = [
        f".{name} {{ stroke: var(--{name}); }} .{name}-head {{ fill: var(--{name}); }} "
        f".{name}-text {{ fill: var(--{name}); font-weight: 600; }}"
        for name in LINES
    ]
    scheme = f"svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    return f"{scheme}{STYLE}" + "\n".join(rules)


def _heads() -> Iterator[str]:
    """Arrow heads, in each colour and weight that is used."""
    for colour, kind in product(LINES, ("line", "data")):
        size = 7 if kind == "line" else 12
        yield (
            f'<marker id="{colour}-{kind}" viewBox="0 0 10 10" refX="{1 if kind == "data" else 3}" refY="5" '
            f'markerWidth="{size}" markerHeight="{size}" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path class="{colour}-head" d="M 0 0 L 10 5 L 0 10 z"/></marker>'
        )


def picture() -> str:
    """The SVG."""
    assert links_of_a_job() == LINKS, f"draw what has changed: {links_of_a_job() ^ LINKS}"
    parts = (_cards(), _control(), _outputs(), _data())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            "<title>The roles of a job, and what travels between them in a step</title>",
            f"<style>{_style()}</style><defs>{''.join(_heads())}</defs>",
            f'<rect class="paper" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="16"/>',
            *chain.from_iterable(parts),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    FILE.write_text(picture())
