"""The results of the runs of the public Model Zoo's models, as the documentation shows them."""

import json
import tomllib
from pathlib import Path

from zoo_runs import Result

FILE = Path(__file__).parents[2] / "docs/zoo_models.toml"


def row(result: Result) -> tuple[str, str, str, str]:
    """Model, configuration, losses, and the difference from the CPU's or the reason why there are none."""
    configuration = result.model.configuration
    if result.reason:
        remark = f"{result.reason}, also on the CPU" if result.reason == result.reason_on_cpu else result.reason
    elif result.reason_on_cpu:
        remark = f"on the CPU: {result.reason_on_cpu}"
    else:
        difference = max(abs(own / other - 1) for own, other in zip(result.losses, result.on_cpu, strict=True))
        remark = f"{100 * difference:.2g} %"
    losses = ", ".join(f"{loss:.4g}" for loss in result.losses) if not result.reason else ""
    return result.model.name, configuration.name if configuration else "", losses, remark


def record(release: str, result: Result) -> None:
    """Writes a row into the documentation's file, in place of an earlier one of the same model and configuration."""
    releases = tomllib.loads(FILE.read_text()) if FILE.exists() else {}
    rows = {tuple(each[:2]): each for each in releases.get(release, {}).get("rows", [])}
    new = row(result)
    rows[new[:2]] = list(new)
    releases[release] = {"rows": [rows[key] for key in sorted(rows)]}
    lines = ["# Written by `python tests/zoo`: model, configuration, losses, and a remark, for each release.", ""]
    for name in sorted(releases, key=_numbers):
        written = (f"    {json.dumps(each, ensure_ascii=False)}," for each in releases[name]["rows"])
        lines += [f"[{json.dumps(name)}]", "rows = [", *written, "]", ""]
    FILE.write_text("\n".join(lines))


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".") if part.isdigit()]
