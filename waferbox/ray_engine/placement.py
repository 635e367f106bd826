"""Where Ray is to put a cluster: one placement group, all of it or nothing, of bundles of which each is on one host."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from waferbox.ray_engine.settings import Resources

# Bundles go to different hosts as far as there are some, and together where there are not.
STRATEGY: Final = "SPREAD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The bundles, with whose processes they are for, and for each process its module and the number of its bundle."""

    bundles: Sequence[Resources]
    members: Sequence[Sequence[str]]  # modules, of each bundle
    slots: Sequence[tuple[str, int]]


def lay_out(roles: Mapping[str, int], resources: Mapping[str, Resources]) -> Layout:
    """A wafer and its workers have a bundle; every other process has one of its own."""
    members: list[list[str]] = [["wafer"] for _ in range(roles["wafer"])]
    for worker in range(roles["workers"]):
        members[worker % roles["wafer"]].append("workers")
    members += [[module] for module in ("memoryx", "swarmx") for _ in range(roles[module])]
    bundles = []
    for modules in members:
        total: Counter[str] = Counter()
        for module in modules:
            for name, amount in resources[module].items():
                total[name] += amount  # type: ignore[assignment]
        bundles.append({name: amount for name, amount in total.items() if amount})
    slots = [(module, number) for number, modules in enumerate(members) for module in modules]
    return Layout(bundles=bundles, members=members, slots=slots)


def what_is_missing(layout: Layout, hosts: Sequence[Mapping[str, Any]], free: Resources) -> str:
    """Which bundles wait, and for what. hosts: as ray.nodes() has them; free: of all hosts together."""
    alive = [host for host in hosts if host["Alive"]]
    kinds = Counter(
        (" + ".join(f"{count} {module}" for module, count in Counter(modules).items()), tuple(sorted(bundle.items())))
        for modules, bundle in zip(layout.members, layout.bundles, strict=True)
    )
    lines = []
    for (who, bundle), count in kinds.items():
        fits = any(all(host["Resources"].get(name, 0.0) >= amount for name, amount in bundle) for host in alive)
        scarce = [name for name, amount in bundle if free.get(name, 0.0) < amount * count]
        why = "no host has so much" if not fits else f"of {', '.join(scarce)} too little is free" if scarce else ""
        lines.append(f"  {count} x ({who}), each {_text(dict(bundle))}" + (f": {why}" if why else ""))
    lines.append(f"  free on {len(alive)} hosts together: {_text(free)}")
    return "\n".join(lines)


def _text(resources: Resources) -> str:
    shown = {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}
    return ", ".join(f"{name} {amount:g}" for name, amount in shown.items() if "_group_" not in name) or "nothing"
