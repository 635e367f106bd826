"""What a coordinator is told when its process is started, and how: as JSON on a pipe, which is its descriptor 3."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nodes.launch.child import Child
from nodes.launch.spawn import spawn
from wsc.v1 import ingress_pb2

END_SECONDS: Final = 7.0  # after which a coordinator that was told to end must have let its nodes go


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """What a coordinator knows of its job before management tells it the rest."""

    job: str
    token: str
    created: float  # seconds since 1970
    management: str
    listen: str  # host:port; port 0 for any
    cache: Path  # folder of the compiled artifacts
    terminated: str  # what has happened if the process is told to end, for the user: "its cluster went down"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorHome:
    """What the coordinators that one process starts have in common."""

    management: str  # the address that they dial
    host: str  # where they listen
    cache_root: Path
    terminated: str  # as in their settings
    outlives: bool  # whether they outlive that process

    def start(self, request: ingress_pb2.RunCoordinatorRequest) -> Child:
        """A coordinator in a process of its own. Raises SpawnError."""
        settings = CoordinatorSettings(
            job=request.job,
            token=request.token,
            created=request.created,
            management=self.management,
            listen=f"{self.host}:0",
            cache=cache_directory(self.cache_root, request.compile_dir),
            terminated=self.terminated,
        )
        return _start(settings, outlives=self.outlives)


def cache_directory(root: Path, compile_dir: str) -> Path:
    """Where the artifacts of a job lie."""
    return root / compile_dir  # an absolute compile_dir stands for itself


def _start(settings: CoordinatorSettings, *, outlives: bool) -> Child:
    # Over a pipe: other users of the machine can read the arguments of a process.
    reader, writer = os.pipe()
    try:
        with open(writer, "w", encoding="utf-8") as pipe:
            json.dump({**dataclasses.asdict(settings), "cache": str(settings.cache)}, pipe)
        return spawn("appliance.coordinator", [], [reader], outlives=outlives)
    finally:
        os.close(reader)


def read_settings(fd: int) -> CoordinatorSettings:
    """What the process was given."""
    with open(fd, encoding="utf-8") as pipe:
        settings = json.load(pipe)
    return CoordinatorSettings(**{**settings, "cache": Path(settings["cache"])})
