"""Compiled plans on disk, by the hash of what they are made from. What comes from disk is checked like other input.

Beside a plan, in a folder of its key: the report, and what the passes and stages made of the module.
"""

import hashlib
from pathlib import Path
from typing import Final

import torch
from google.protobuf.message import DecodeError

from appliance.compiler.core.target import Target
from appliance.compiler.cost.machine_model import machine_model
from appliance.compiler.pipeline import compile_module
from appliance.compiler.plan import PLAN_FORMAT
from appliance.compiler.plan_check.check import PlanError, check_plan
from appliance.compiler.report.builder import make_report
from appliance.compiler.report.page import report_page
from interconnect.rpc.version import __version__
from nodes.folders import cache_root, why_not_kept, write_whole
from nodes.telemetry.advice import advise
from wsc.v1 import plan_pb2

_MAGIC: Final = b"WSCPLAN1"
_SUM_BYTES: Final = 32
MAX_PLAN_BYTES: Final = 1 << 30
REPORT_DATA: Final = "report.json"
REPORT_PAGE: Final = "report.html"


def artifact_key(text: str, target: Target) -> str:
    """The name of the plan for this module and target."""
    pinned = sorted(target.pinned_shards.items())
    precision = target.precision and (target.precision.half.value, target.precision.level)
    memory = (target.wafer_memory_bytes, target.prefetch_layers)
    made_for = (target.num_csx, target.num_shards, *memory, pinned, precision, target.kernel_library.value)
    made_by = (PLAN_FORMAT, __version__, torch.__version__)
    return hashlib.sha256(f"{made_by}{made_for}\n{text}".encode()).hexdigest()


class ArtifactCache:
    """Plans in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def compile(self, text: str, target: Target) -> tuple[str, plan_pb2.Plan, bool]:
        """The plan with its key, and whether it came from the cache. Raises as `compile_module`."""
        key = artifact_key(text, target)
        path = self._folder / f"{key}.plan"
        plan = load_plan(path)
        if plan is not None:
            return key, plan, True
        beside = self._folder / key
        writer = _Writer(self._folder)
        plan = compile_module(text, target, lambda name, ir: writer.write(beside / f"{name}.mlir", ir.encode()))
        body = plan.SerializeToString(deterministic=True)
        writer.write(path, _MAGIC + hashlib.sha256(body).digest() + body)
        report = make_report(plan, key, machine_model(cache_root()))
        writer.write(beside / REPORT_DATA, report.to_json().encode())
        writer.write(beside / REPORT_PAGE, report_page(report).encode())
        writer.tell()
        return key, plan, False


class _Writer:
    """Writes the files of one compile. That a folder does not take them is told to the user, and fails nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nbytes = 0  # of all files
        self._error: OSError | None = None  # the last

    def write(self, path: Path, content: bytes) -> None:
        self._nbytes += len(content)
        try:
            write_whole(path, content)
        except OSError as error:
            self._error = error

    def tell(self) -> None:
        if self._error is not None:
            why = why_not_kept(self._folder, self._nbytes, self._error.strerror)
            advise("plan", f"The job goes on, but what was compiled for it cannot be kept in {why}")


def load_plan(path: Path) -> plan_pb2.Plan | None:
    """The plan in a file, or None: there is none, it is damaged, or it does not hold together."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PLAN_BYTES + 1)
    except OSError:
        return None
    head = len(_MAGIC) + _SUM_BYTES
    body = data[head:]
    if len(data) > MAX_PLAN_BYTES or data[:head] != _MAGIC + hashlib.sha256(body).digest():
        return None
    try:
        plan = plan_pb2.Plan.FromString(body)
        if plan.format != PLAN_FORMAT:
            return None
        check_plan(plan)
    except (DecodeError, PlanError):
        return None
    return plan
