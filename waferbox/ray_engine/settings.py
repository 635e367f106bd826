"""What a cluster asks of Ray: where it is, and what each role gets of its hosts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from nodes.lifecycle.sizes import UNITS

MODULES: Final = {"memoryx": "memoryx", "swarmx": "swarmx", "wafer": "wafer", "worker": "workers"}  # of the roles

# So that a wafer with what it needs fits on two processors. Memory is not counted unless asked for.
DEFAULT_CPUS: Final[Mapping[str, float]] = {"memoryx": 0.5, "swarmx": 0.25, "wafer": 1.0, "workers": 0.25}

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
        return max(1, int(self.resources["wafer"].get("CPU", 0.0)))


def parse_resources(given: Sequence[str]) -> Mapping[str, Resources]:
    """What each role module gets, the defaults included, of words such as "wafer.GPU=1" and "memoryx.memory=64g".

    Raises ValueError.
    """
    resources: dict[str, dict[str, float]] = {module: {"CPU": cpus} for module, cpus in DEFAULT_CPUS.items()}
    for word in given:
        name, _, amount = word.partition("=")
        role, _, resource = name.partition(".")
        if role not in MODULES or not resource:
            raise ValueError(f"{word!r} must look like ROLE.NAME=AMOUNT, and the roles are {', '.join(MODULES)}")
        resources[MODULES[role]][resource] = _amount(word, amount)
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
