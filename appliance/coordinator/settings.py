"""What a coordinator is told when its process is started, and how: as JSON on a pipe, which is its descriptor 3."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from waferbox.launch.spawn import Child, spawn
from wsc.v1 import ingress_pb2

CUT_OFF_STATUS: Final = 74  # exit status of one whose script was cut off, and for which another is to wait
TAKEN_STATUS: Final = 75  # exit status of one that finds the job to be another process'


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """What a coordinator knows of its job before management tells it the rest."""

    job: str
    token: str
    created: float  # seconds since 1970
    management: str
    listen: str  # host:port; port 0 for any
    cache: Path  # folder of the compiled artifacts
    cache_root: Path  # takes the key that these are authenticated with
    terminated: str  # what has happened if the process is told to end, for the user: "its cluster went down"
    ingress: str = ""  # the address of the one that runs it; empty: management does
    restarted: bool = False  # in place of one that has ended by no wish of anybody
    may_restart: bool = False  # another is to take up the job where it ends so


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorHome:
    """What the coordinators that one process starts have in common."""

    management: str  # the address that they dial
    host: str  # where they listen
    cache_root: Path
    compile_root: Path | None  # below which scripts may name folders of their own; None: the cache root alone
    terminated: str  # as in their settings
    ingress: str = ""  # likewise; they do not outlive an ingress

    def start(self, request: ingress_pb2.RunCoordinatorRequest) -> Child:
        """A coordinator in a process of its own. Raises SpawnError, or FolderRefused."""
        settings = CoordinatorSettings(
            job=request.job,
            token=request.token,
            created=request.created,
            management=self.management,
            listen=f"{self.host}:0",
            cache=cache_directory(self.cache_root, self.compile_root, request.compile_dir),
            cache_root=self.cache_root,
            terminated=self.terminated,
            ingress=self.ingress,
            restarted=request.restarted,
            may_restart=request.may_restart,
        )
        return _start(settings, outlives=not self.ingress)


class FolderRefused(ValueError):
    """A script has named a folder that the cluster does not write to."""


def cache_directory(cache_root: Path, compile_root: Path | None, compile_dir: str) -> Path:
    """Where the artifacts of a job lie: below the cache root, or where else the owner of the cluster allows it.

    Args:
        compile_root: below which a script may name folders too, by absolute paths; None: nowhere.
        compile_dir: what the script has named; relative to the cache root.

    Raises:
        FolderRefused: it lies elsewhere, also where a link leads there.
    """
    roots = [cache_root] if compile_root is None else [cache_root, compile_root]
    problem = "" if "\0" not in compile_dir else "it has a null character in it"
    if ".." in Path(compile_dir).parts:
        problem = "it must not contain '..'"
    if not problem:
        folder = (cache_root / compile_dir).resolve()
        if any(folder.is_relative_to(root.resolve()) for root in roots):
            return folder
        problem = f"it lies outside of {' and '.join(map(str, roots))} of the cluster"
    raise FolderRefused(
        f"compile_dir {compile_dir[:256]!r} is not possible: {problem}. Name a folder relative to {cache_root}, or "
        "start the cluster with --compile-root set to a folder above it"
    )


def _start(settings: CoordinatorSettings, *, outlives: bool) -> Child:
    # Over a pipe: other users of the machine can read the arguments of a process.
    reader, writer = os.pipe()
    try:
        with open(writer, "w", encoding="utf-8") as pipe:
            json.dump(dataclasses.asdict(settings), pipe, default=str)
        return spawn("appliance.coordinator", [], [reader], outlives=outlives)
    finally:
        os.close(reader)


def read_settings(fd: int) -> CoordinatorSettings:
    """What the process was given."""
    with open(fd, encoding="utf-8") as pipe:
        settings = json.load(pipe)
    folders = {name: Path(settings[name]) for name in ("cache", "cache_root")}
    return CoordinatorSettings(**{**settings, **folders})
