"""What a cluster asks of Ray: its address, what each role gets of its hosts, and the placement group of these."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from waferbox.host.memory import UNITS
from waferbox.roles import LEASED, MEMORYX, SWARMX, WAFER, WORKER

# --- What a cluster asks of Ray: where it is, and what each role gets of its hosts ------------------------------------


Resources = Mapping[str, float]  # by Ray's names: CPU, GPU, memory in bytes, and those of a site's own


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """address: "auto", HOST:PORT or ray://HOST:PORT."""

    address: str = "auto"
    resources: Mapping[str, Resources] = field(default_factory=lambda: parse_resources(()))  # by module
    runtime_env: Mapping[str, Any] | None = None  # as Ray's own, for all role processes

    @property
    def wafer_threads(self) -> int:
        """As many as a wafer has processors."""
        return max(1, int(self.resources[WAFER.module].get("CPU", 0.0)))


def parse_resources(given: Sequence[str]) -> Mapping[str, Resources]:
    """What each role module gets, the defaults included, of words such as "wafer.GPU=1" and "memoryx.memory=64g".

    Raises ValueError.
    """
    resources: dict[str, dict[str, float]] = {role.module: {"CPU": role.default_cpus} for role in LEASED}
    modules = {role.name: role.module for role in LEASED}
    for word in given:
        name, _, amount = word.partition("=")
        role_name, _, resource = name.partition(".")
        if role_name not in modules or not resource:
            raise ValueError(f"{word!r} must look like ROLE.NAME=AMOUNT, and the roles are {', '.join(modules)}")
        resources[modules[role_name]][resource] = _amount(word, amount)
    return resources


def read_runtime_env(path: Path) -> Mapping[str, Any]:
    """A file as `ray job submit --runtime-env` takes it. Raises ValueError, OSError."""
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} has to be a mapping, with keys such as working_dir, py_modules, pip and env_vars")
    return content


def _amount(word: str, text: str) -> float:
    factor = UNITS.get(text[-1:].lower(), 1)
    try:
        amount = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        amount = -1.0
    if not 0 <= amount < math.inf:
        raise ValueError(f"{word!r}: the amount is a number, for memory of bytes or such as 64g")
    return amount


# ----------------------------------------------------------------------------------------------------------------------
# Where Ray is to put a cluster: one placement group, all of it or nothing, of bundles of which each is on one host


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
    members: list[list[str]] = [[WAFER.module] for _ in range(roles[WAFER.module])]
    for worker in range(roles[WORKER.module]):
        members[worker % roles[WAFER.module]].append(WORKER.module)
    members += [[module] for module in (MEMORYX.module, SWARMX.module) for _ in range(roles[module])]
    bundles = []
    for modules in members:
        total: Counter[str] = Counter()
        for module in modules:
            for name, amount in resources[module].items():
                total[name] += amount  # type: ignore[assignment]
        bundles.append({name: amount for name, amount in total.items() if amount})
    slots = [(module, number) for number, modules in enumerate(members) for module in modules]
    return Layout(bundles=bundles, members=members, slots=slots)


def missing_resources(layout: Layout, hosts: Sequence[Mapping[str, Any]], free: Resources) -> str:
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
