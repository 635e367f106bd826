"""The settings of a coordinator, passed to its process as JSON on a pipe, which is its descriptor 3."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from waferbox.launch.spawn import Child, spawn
from wsc.v1 import ingress_pb2

CUT_OFF_STATUS: Final = 74  # exit status of a coordinator whose script was cut off, and is awaited by a successor
TAKEN_STATUS: Final = 75  # exit status of a coordinator whose job another process holds
# The fork server sends it when the cluster ends without a word of management; SIGTERM is a death like others.
END_SIGNAL: Final = signal.SIGHUP
ARTIFACT_SECONDS: Final = 30 * 24 * 3600.0

_ARTIFACT: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """The settings that a coordinator's process starts with."""

    job: str
    token: str
    created: float  # seconds since 1970
    management: str
    listen: str  # host:port; port 0 for any
    cache: Path  # folder of the compiled artifacts
    cache_root: Path  # cache root, with the key that authenticates the artifacts
    terminated: str  # cause, for the user, if a process that gets no successor is ended
    ingress: str = ""  # address of the ingress that runs it; empty: management does
    restarted: bool = False  # whether it replaces a coordinator that ended unexpectedly
    may_restart: bool = False  # whether a successor takes over the job if this one ends unexpectedly


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorHome:
    """The common settings of all coordinators that one process starts."""

    management: str  # address of the management service
    host: str  # the address where a coordinator listens
    cache_root: Path
    compile_root: Path | None  # scripts may name folders below it; None: below the cache root only
    terminated: str  # as in CoordinatorSettings
    ingress: str = ""  # as in CoordinatorSettings; coordinators do not outlive an ingress

    def start(self, request: ingress_pb2.RunCoordinatorRequest) -> Child:
        """Starts a coordinator in a process of its own. Raises SpawnError, FolderRefused."""
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
    """Raised for a folder that the cluster does not write to."""


def cache_directory(cache_root: Path, compile_root: Path | None, compile_dir: str) -> Path:
    """Returns the folder of a job's artifacts: below the cache root, or below the folder that the owner allows.

    Args:
        cache_root: of the cluster.
        compile_root: absolute paths below it are allowed too; None: none are.
        compile_dir: as the script names it; relative to the cache root.

    Raises:
        FolderRefused: it lies elsewhere, possibly by a symbolic link.
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


def sweep_artifacts(cache_root: Path, older_than_seconds: float = ARTIFACT_SECONDS) -> None:
    """Removes plans that no job has used for so many seconds, and their reports, from the folder of most scripts."""
    folder, newest = cache_root / "cached_compile", time.time() - older_than_seconds
    with contextlib.suppress(OSError):
        for key in {entry.stem for entry in folder.iterdir() if _ARTIFACT.fullmatch(entry.stem)}:
            plan, reports = folder / f"{key}.plan", folder / key
            # A compile writes the reports first, and the plan at last.
            if (plan if plan.exists() else reports).stat().st_mtime < newest:
                plan.unlink(missing_ok=True)
                shutil.rmtree(reports, ignore_errors=True)


def _start(settings: CoordinatorSettings, *, outlives: bool) -> Child:
    # Over a pipe, as other users of the machine can read the arguments of a process.
    reader, writer = os.pipe()
    try:
        with open(writer, "w", encoding="utf-8") as pipe:
            json.dump(dataclasses.asdict(settings), pipe, default=str)
        return spawn("appliance.coordinator", [], [reader], outlives=outlives, end_signal=END_SIGNAL)
    finally:
        os.close(reader)


def read_settings(fd: int) -> CoordinatorSettings:
    """Returns the settings of this process."""
    with open(fd, encoding="utf-8") as pipe:
        settings = json.load(pipe)
    folders = {name: Path(settings[name]) for name in ("cache", "cache_root")}
    return CoordinatorSettings(**{**settings, **folders})
