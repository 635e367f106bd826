"""Compiles of the configurations of the public Model Zoo at their full size, with `--compile_only`."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from zoo_cuts import inputs, values
from zoo_models import package
from zoo_runs import execute, failure
from zoo_samples import NoSamples, Samples

MARK = "WAFERBOX_CACHE"  # a variable that all processes of a compile have: each compile has a folder of its own
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile:
    """How the compile of a configuration ended.

    Attributes:
        seconds: From start to end.
        processor: Seconds of processors, of all processes.
        memory: The most bytes at once, of all processes; shared ones count once.
        reason: Why it failed; empty if it did not.
    """

    seconds: float = 0
    processor: float = 0
    memory: int = 0
    reason: str = ""


def configurations(checkout: Path) -> Iterator[Path]:
    """All configurations of the models of a checkout."""
    yield from sorted((package(checkout) / "models").rglob("configs/**/*.yaml"))


def compile_at_full_size(path: Path, checkout: Path, folder: Path, limit: float) -> Compile:
    """Compiles training and its evaluation in a folder of their own, at most so many seconds.

    Nothing of the configuration is changed but the places of data and results, and a backend that it does not name.
    """
    configuration = yaml.safe_load(path.read_text())
    folder.mkdir(parents=True)
    trainer = configuration.get("trainer")
    if trainer:
        trainer["init"]["model_dir"] = str(folder / "model")
        if not {"backend", "device"} & trainer["init"].keys():
            trainer["init"]["backend"] = {"backend_type": "CSX"}  # which its users name on the command line
        for name in [name for name in trainer if name not in ("init", "fit")]:
            del trainer[name]
    else:
        configuration["runconfig"]["model_dir"] = str(folder / "model")
    try:
        for number, (_, section) in enumerate(inputs(configuration)):
            _samples(folder / f"data-{number}", section, configuration).write()
    except NoSamples as problem:
        return Compile(reason=str(problem))
    parameters = folder / "params.yaml"
    parameters.write_text(yaml.safe_dump(configuration))
    meter = Meter(str(folder / "cache"))
    begin = time.monotonic()
    text, status = execute(
        ["-m", "cerebras.modelzoo.cli.main", "fit", str(parameters), "--compile_only"],
        checkout,
        folder,
        limit,
        {MARK: meter.mark},
        meter.read,
    )
    return Compile(
        seconds=time.monotonic() - begin,
        processor=sum(meter.processor.values()),
        memory=meter.memory,
        reason=failure(text, status, limit),
    )


def _samples(folder: Path, section: dict[str, Any], configuration: dict[str, Any]) -> Samples:
    """A file with a whole batch for each process of the loader; samples as long as the section or the model says."""
    added = sum(values(configuration, "attention_sink_tokens"))  # by the input function
    lengths = [
        section.get("max_sequence_length"),
        *(positions - added for positions in values(configuration, "max_position_embeddings")),
        *values(configuration, "max_sequence_length"),
    ]
    sizes = {"files": max(2, section.get("num_workers") or 0), "count": max(32, section["batch_size"])}
    if length := next(filter(None, lengths), None):
        sizes["length"] = length
        sizes["predictions"] = max(1, min(length // 4, *values(section, "max_predictions_per_seq"), length))
    if isinstance(image := next(values(configuration, "image_size"), None), list):
        patch = next(values(configuration, "patch_size"))
        sizes["patches"] = (image[0] // patch[0]) * (image[1] // patch[1])
    return Samples(folder, section, configuration, **sizes)


class Meter:
    """What the processes of a compile use: those with its mark in their environment."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.memory = 0
        self.processor: dict[int, float] = {}

    def read(self) -> None:
        memory = 0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    fields = (process / "stat").read_text().rpartition(")")[2].split()
                    self.processor[int(process.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
                    rows = (process / "smaps_rollup").read_text().splitlines()[1:]
                    memory += next(int(row.split()[1]) for row in rows if row.startswith("Pss:")) * 1024
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue  # it has ended, or is another user's
        self.memory = max(self.memory, memory)
