"""The artifacts of compiles on disk: plans, by the hash of their inputs, each with its report and stages."""

import contextlib
import dataclasses
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Final

import torch
from google.protobuf.message import DecodeError

from appliance.compiler.core.progress import progress
from appliance.compiler.core.target import MicroBatching, Target
from appliance.compiler.cost.machine_model import machine_model
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.plan import PLAN_FORMAT
from appliance.compiler.plan_check.check import PlanError, check_plan
from appliance.compiler.report.builder import make_report
from appliance.compiler.report.page import report_page
from waferbox import __version__
from waferbox.execution_folders import REPORT_PAGE
from waferbox.host.folders import KEY_BYTES, cache_root, secret_key, why_not_kept, write_whole
from waferbox.runtime.logs import advise
from wsc.v1 import plan_pb2

# --- The cache of plans -----------------------------------------------------------------------------------------------
#
# A plan decides what every role does with a user's data, so it is authenticated. A script may choose the folder of the
# plans, so others may be able to write to it. The key lies in the cluster's cache root, which only its owner can read.

SUFFIX: Final = ".plan"
_MAGIC: Final = b"WSCPLAN2"
_SUM_BYTES: Final = 32  # size of the hash, and of the keyed hash
_HEAD_BYTES: Final = len(_MAGIC) + 2 * _SUM_BYTES
MAX_PLAN_BYTES: Final = 1 << 30


def artifact_key(text: str, target: Target, asked: MicroBatching | None = None) -> str:
    """The name of the plan for this module, target and division into micro-batches: a hash of all of them."""
    # Everything that can change a plan has to be part of the key, the versions of the compiler and of torch included.
    pinned = sorted(target.pinned_shards.items())
    mixed = target.precision
    precision = mixed and (mixed.half.value, mixed.level, mixed.half_gradients)
    memory = (target.wafer_memory_bytes, target.prefetch_layers, target.drops_weights)
    time = (target.micro_batches, asked and dataclasses.astuple(asked))
    how = (target.kernel_library.value, target.execution_strategy.value, target.wafer_cores, target.strict_sharding)
    replicas = (target.num_replicas, target.asynchronous_updates)
    made_for = (target.num_csx, target.num_shards, *memory, pinned, precision, *how, *replicas, time)
    made_by = (PLAN_FORMAT, __version__, torch.__version__)
    return hashlib.sha256(f"{made_by}{made_for}\n{text}".encode()).hexdigest()


class PlanCache:
    """The plans in a folder, authenticated by a key."""

    def __init__(self, folder: Path, key: bytes) -> None:
        self._folder = folder
        self._key = key

    def path(self, name: str) -> Path:
        """The path of the plan with this name."""
        return self._folder / f"{name}{SUFFIX}"

    def content(self, name: str, plan: plan_pb2.Plan) -> bytes:
        """The content of the file of a plan."""
        body = plan.SerializeToString(deterministic=True)
        digest = hashlib.sha256(body).digest()
        return _MAGIC + digest + self._tag(name, digest) + body

    def load(self, name: str) -> plan_pb2.Plan | None:
        """The plan with this name; None if it is missing, damaged, not authenticated by the key, or inconsistent."""
        data = _read(self.path(name))
        digest, tag = data[len(_MAGIC) : len(_MAGIC) + _SUM_BYTES], data[len(_MAGIC) + _SUM_BYTES : _HEAD_BYTES]
        # Nothing of the content is parsed before the tag is verified.
        return _parse(data) if hmac.compare_digest(tag, self._tag(name, digest)) else None

    def _tag(self, name: str, digest: bytes) -> bytes:
        """The keyed hash. It covers the name, so that a plan cannot be used under the name of another."""
        return hashlib.blake2b(name.encode() + digest, key=self._key, digest_size=_SUM_BYTES).digest()


def read_plan(path: Path) -> plan_pb2.Plan | None:
    """The plan in a file, without authentication: to be shown, not to be run. None if it is damaged or inconsistent."""
    return _parse(_read(path))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read() if os.fstat(file.fileno()).st_size <= MAX_PLAN_BYTES else b""
    except OSError:
        return b""


def _parse(data: bytes) -> plan_pb2.Plan | None:
    body = data[_HEAD_BYTES:]
    if not data.startswith(_MAGIC + hashlib.sha256(body).digest()):
        return None
    try:
        plan = plan_pb2.Plan.FromString(body)
        if plan.format != PLAN_FORMAT:
            return None
        check_plan(plan)
    except (DecodeError, PlanError):
        return None
    return plan


# --- The files of a compile: the plan, and a folder with the report and the stages ------------------------------------

KEY_FILE: Final = "plans.key"
REPORT_DATA: Final = "report.json"


class Artifacts:
    """The artifacts in a folder: compiles steps, or takes their plans from there."""

    def __init__(self, folder: Path, root: Path) -> None:
        """root: the cluster's cache root, in which the key of plans lies; one is made if it is missing."""
        self._folder = folder
        self._is_in_cache = folder.absolute().is_relative_to(root.absolute())  # and not a folder of the user's own
        try:
            key = secret_key(root / KEY_FILE)
        except OSError as error:
            key = secrets.token_bytes(KEY_BYTES)
            why = why_not_kept(root, KEY_BYTES, error.strerror)
            advise("plan", f"The job continues, but others cannot use its plans: their key cannot be stored in {why}")
        self._plans = PlanCache(folder, key)

    def compile(self, text: str, target: Target, asked: MicroBatching | None = None) -> tuple[str, plan_pb2.Plan, bool]:
        """Compiles a module, unless its plan is in the folder.

        Args:
            text: a module in CIRH.
            target: the cluster to compile for.
            asked: how the batch is divided into micro-batches.

        Returns:
            The key of the plan, the plan, and whether it came from the folder.

        Raises:
            CirhError, CompileError: as `compile_in_micro_batches`.
        """
        name = artifact_key(text, target, asked)
        plan = self._plans.load(name)
        if plan is not None:
            with contextlib.suppress(OSError):  # another user's folder
                os.utime(self._plans.path(name))  # unused plans are removed
            return name, plan, True
        beside = self._folder / name
        writer = _Writer(self._folder, by_umask=not self._is_in_cache)

        def keep(stage: str, ir: str) -> None:
            writer.write(beside / f"{stage}.mlir", ir.encode())

        plan = compile_in_micro_batches(text, target, asked, lambda: machine_model(cache_root()), keep)
        writer.write(self._plans.path(name), self._plans.content(name, plan))
        progress("writing the report")
        report = make_report(plan, name, machine_model(cache_root()))
        writer.write(beside / REPORT_DATA, report.to_json().encode())
        writer.write(beside / REPORT_PAGE, report_page(report).encode())
        writer.log_failure()
        return name, plan, False


class _Writer:
    """Writes the files of one compile. If they cannot be written, the user is advised, but the compile succeeds."""

    def __init__(self, folder: Path, *, by_umask: bool) -> None:
        """by_umask: as for write_whole."""
        self._folder = folder
        self._by_umask = by_umask
        self._nbytes = 0  # of all files
        self._error: OSError | None = None  # the last one

    def write(self, path: Path, content: bytes) -> None:
        self._nbytes += len(content)
        try:
            write_whole(path, content, by_umask=self._by_umask)
        except OSError as error:
            self._error = error

    def log_failure(self) -> None:
        """Advises the user if a file could not be written."""
        if self._error is not None:
            why = why_not_kept(self._folder, self._nbytes, self._error.strerror)
            advise("plan", f"The job continues, but its compiled plan cannot be stored in {why}")
