"""The models of a checkout of the public Model Zoo, of any release."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's folder with one of its configurations: the first for each kind of training data."""

    name: str
    script: Path
    configuration: Path | None


def release(checkout: Path) -> str:
    """The number in the name of the checkout's folder, such as "2.0.3"; the whole name if it has none."""
    name = checkout.resolve().name
    found = re.search(r"\d+(\.\d+)+", name)
    return found.group() if found else name


def import_root(checkout: Path) -> Path:
    """The folder that the checkout's scripts import from."""
    return checkout / "src" if (checkout / "src/cerebras").is_dir() else checkout


def package(checkout: Path) -> Path:
    """The folder of the checkout's package."""
    root = import_root(checkout)
    return root / "cerebras/modelzoo" if root.name == "src" else root / "modelzoo"


def is_before_1_9(checkout: Path) -> bool:
    """Whether the checkout's scripts take the way to execute as an argument, as those of release 1.8 do."""
    parser = import_root(checkout) / "modelzoo/common/run_utils/cli_parser.py"
    return parser.exists() and "execution_strategy_parser" in parser.read_text()


def models(checkout: Path) -> Iterator[Model]:
    """The models of PyTorch: the folders with a script `run.py`, and with configurations or a `model.py`."""
    root = package(checkout)
    for script in sorted(root.rglob("run.py")):
        parts = script.parent.relative_to(root).parts
        is_model = (script.parent / "model.py").exists() or (script.parent / "configs").is_dir()
        if not {"tf", "data_preparation"}.intersection(parts) and is_model:
            name = "/".join(part for part in parts if part not in ("models", "pytorch"))
            for configuration in _configurations(script.parent / "configs"):
                yield Model(name=name, script=script, configuration=configuration)


def _configurations(folder: Path) -> list[Path | None]:
    first: dict[str, Path | None] = {}
    for path in sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), path.name)):
        first.setdefault(_processor(yaml.safe_load(path.read_text())), path)
    return list(first.values()) or [None]


def _processor(section: Any) -> str:
    """The first data processor that a configuration names."""
    if isinstance(section, dict):
        if isinstance(section.get("data_processor"), str):
            return str(section["data_processor"])
        section = list(section.values())
    return next(filter(None, map(_processor, section)), "") if isinstance(section, list) else ""
