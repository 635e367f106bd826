"""The settings of a cluster on Ray: Ray's address, the resources of each role, and the placement group for them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from waferbox.host.memory import UNITS
from waferbox.roles import LEASED, MEMORYX, SWARMX, WAFER, WORKER

Resources = Mapping[str, float]  # by Ray's names: CPU, GPU, memory in bytes, and custom resources


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """The settings of a cluster on Ray."""

    address: str = "auto"  # or HOST:PORT, or ray://HOST:PORT
    resources: Mapping[str, Resources] = field(default_factory=lambda: parse_resources(()))  # by module
    runtime_env: Mapping[str, Any] | None = None  # Ray's runtime environment of all role processes

    @property
    def wafer_threads(self) -> int:
        """The number of threads of a wafer: as many as it has processors."""
        return max(1, int(self.resources[WAFER.module].get("CPU", 0.0)))


def parse_resources(given: Sequence[str]) -> Mapping[str, Resources]:
    """The resources of each role module: the defaults, changed by words such as "wafer.GPU=1" and "memoryx.memory=64g".

    Raises:
        ValueError: a word has another form, or names no role.
    """
    resources: dict[str, dict[str, float]] = {role.module: {"CPU": role.default_cpus} for role in LEASED}
    modules = {role.name: role.module for role in LEASED}
    for word in given:
        name, _, amount = word.partition("=")
        role_name, _, resource = name.partition(".")
        if role_name not in modules or not resource:
            raise ValueError(f"{word!r} must look like ROLE.NAME=AMOUNT; the roles are {', '.join(modules)}")
        resources[modules[role_name]][resource] = _amount(word, amount)
    return resources


def read_runtime_env(path: Path) -> Mapping[str, Any]:
    """Reads a runtime environment from a file as for `ray job submit --runtime-env`. Raises ValueError, OSError."""
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
        raise ValueError(f"{word!r}: the amount is a number; for memory the bytes, or such as 64g")
    return amount


# --- The placement group ----------------------------------------------------------------------------------------------


STRATEGY: Final = "SPREAD"  # bundles on different hosts where possible


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The bundles of a cluster's placement group. Ray reserves all of them at once, each on one host."""

    bundles: Sequence[Resources]
    members: Sequence[Sequence[str]]  # the modules of the processes in each bundle
    slots: Sequence[tuple[str, int]]  # module and bundle of each process


def lay_out(roles: Mapping[str, int], resources: Mapping[str, Resources]) -> Layout:
    """Assigns processes to bundles: one bundle for a wafer and its workers, one for every other process."""
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
    """Lists the bundles and the resources that each lacks, as lines for the user.

    Args:
        layout: the bundles.
        hosts: Ray's hosts, as from ray.nodes().
        free: the free resources of all hosts together.
    """
    alive = [host for host in hosts if host["Alive"]]
    kinds = Counter(
        (" + ".join(f"{count} {module}" for module, count in Counter(modules).items()), tuple(sorted(bundle.items())))
        for modules, bundle in zip(layout.members, layout.bundles, strict=True)
    )
    lines = []
    for (processes, bundle), count in kinds.items():
        fits = any(all(host["Resources"].get(name, 0.0) >= amount for name, amount in bundle) for host in alive)
        scarce = [name for name, amount in bundle if free.get(name, 0.0) < amount * count]
        lack = "no host has so much" if not fits else f"too little {', '.join(scarce)} is free" if scarce else ""
        lines.append(f"  {count} x ({processes}), each {_text(dict(bundle))}" + (f": {lack}" if lack else ""))
    lines.append(f"  free on {len(alive)} hosts together: {_text(free)}")
    return "\n".join(lines)


def _text(resources: Resources) -> str:
    shown = {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}
    return ", ".join(f"{name} {amount:g}" for name, amount in shown.items() if "_group_" not in name) or "nothing"
