"""Compiled plans on disk, by the hash of what they are made from. What comes from disk is checked like other input.

Beside a plan, in a folder of its key: the report, and what the passes and stages made of the module.
"""

import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import Final

import torch
from google.protobuf.message import DecodeError

from appliance.compiler.machine_model import machine_model
from appliance.compiler.pipeline import compile_module
from appliance.compiler.plan import PLAN_FORMAT
from appliance.compiler.plan_check.check import PlanError, check_plan
from appliance.compiler.report_builder import make_report
from appliance.compiler.report_page import report_page
from appliance.compiler.target import Target
from interconnect.folders import cache_root
from interconnect.version import __version__
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
        plan = compile_module(text, target, lambda name, ir: _write(beside / f"{name}.mlir", ir.encode()))
        body = plan.SerializeToString(deterministic=True)
        _write(path, _MAGIC + hashlib.sha256(body).digest() + body)
        report = make_report(plan, key, machine_model(cache_root()))
        _write(beside / REPORT_DATA, report.to_json().encode())
        _write(beside / REPORT_PAGE, report_page(report).encode())
        return key, plan, False


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


def _write(path: Path, content: bytes) -> None:
    """Writes to a temporary name and renames; a folder that cannot be written is no reason to fail a compile."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
