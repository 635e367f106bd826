"""What one compile leaves on disk: the plan, and in a folder beside it the report and the stages of the module."""

import secrets
from pathlib import Path
from typing import Final

from appliance.compiler.cache import PlanCache, artifact_key
from appliance.compiler.core.micro_batching import MicroBatching
from appliance.compiler.core.target import Target
from appliance.compiler.cost.machine_model import machine_model
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.report.builder import make_report
from appliance.compiler.report.page import report_page
from interconnect.folders import KEY_BYTES, secret_key
from nodes.folders import cache_root, why_not_kept, write_whole
from nodes.telemetry.advice import advise
from wsc.v1 import plan_pb2

KEY_FILE: Final = "plans.key"
REPORT_DATA: Final = "report.json"
REPORT_PAGE: Final = "report.html"


class Artifacts:
    """What was compiled, in one folder."""

    def __init__(self, folder: Path, root: Path) -> None:
        """root: the cluster's cache root, which has the key of plans, or takes a fresh one."""
        self._folder = folder
        try:
            key = secret_key(root / KEY_FILE)
        except OSError as error:
            key = secrets.token_bytes(KEY_BYTES)
            why = why_not_kept(root, KEY_BYTES, error.strerror)
            advise("plan", f"The job goes on, but others will not use its plans, as their key cannot be kept in {why}")
        self._plans = PlanCache(folder, key)

    def compile(self, text: str, target: Target, asked: MicroBatching | None = None) -> tuple[str, plan_pb2.Plan, bool]:
        """The plan of a module with its key, and whether it came from the cache. Raises as `compile_module`.

        asked: how the batch is divided in time.
        """
        name = artifact_key(text, target, asked)
        plan = self._plans.load(name)
        if plan is not None:
            return name, plan, True
        beside = self._folder / name
        writer = _Writer(self._folder)

        def keep(stage: str, ir: str) -> None:
            writer.write(beside / f"{stage}.mlir", ir.encode())

        plan = compile_in_micro_batches(text, target, asked, lambda: machine_model(cache_root()), keep)
        writer.write(self._plans.path(name), self._plans.content(name, plan))
        report = make_report(plan, name, machine_model(cache_root()))
        writer.write(beside / REPORT_DATA, report.to_json().encode())
        writer.write(beside / REPORT_PAGE, report_page(report).encode())
        writer.tell()
        return name, plan, False


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
