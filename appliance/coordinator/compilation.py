"""The compiler as the coordinator uses it: a step's CIRH in; a plan out, compiled or from the cache."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from waferbox.execution_folders import REPORT_PAGE
from waferbox.host.folders import cache_root
from wsc.v1 import plan_pb2


class CompileRefused(ValueError):
    """Raised for a step without a plan on this cluster; the message names the operation, its line and a remedy."""


class Compile(Protocol):
    """Compiles a step. Returns hash, plan, and whether it came from the cache. Raises CompileRefused."""

    def __call__(
        self,
        cirh: str,
        num_csx: int,
        num_shards: int,
        placed: Mapping[str, int],
        options: plan_pb2.CompileOptions,
        /,
    ) -> tuple[str, plan_pb2.Plan, bool]:
        """placed: the shard of each state that the job has placed already."""


def cached_compiler(folder: Path, root: Path) -> Compile:
    """Returns the real compiler, with artifacts in a folder. root: the cache root, which has the key of the plans."""
    from appliance.compiler.artifacts import Artifacts
    from appliance.compiler.core.target import DEFAULT_WAFER_MEMORY_BYTES, ExecutionStrategy, MicroBatching
    from appliance.compiler.pipeline import CompileError, KernelLibrary, Precision, Target
    from waferbox.cirh import CirhError

    artifacts = Artifacts(folder, root)

    def compile_step(
        cirh: str, num_csx: int, num_shards: int, placed: Mapping[str, int], options: plan_pb2.CompileOptions
    ) -> tuple[str, plan_pb2.Plan, bool]:
        try:
            target = Target(
                num_csx=num_csx,
                num_shards=num_shards,
                pinned_shards=placed,
                precision=Precision.from_proto(options.precision) if options.HasField("precision") else None,
                kernel_library=KernelLibrary.from_proto(options.kernel_library),
                wafer_memory_bytes=options.wafer_memory_bytes or DEFAULT_WAFER_MEMORY_BYTES,
                execution_strategy=ExecutionStrategy.from_proto(options.execution_strategy),
                num_replicas=options.num_replicas or 1,
                asynchronous_updates=options.asynchronous_updates,
                strict_sharding=options.strict_sharding,
                drops_weights=options.drops_weights,
                # The hosts of wafers are assumed to be like this one.
                wafer_cores=len(os.sched_getaffinity(0)),
            )
        except ValueError as error:
            raise CompileRefused(str(error)) from error
        micro_batching = None
        if options.HasField("micro_batching"):
            micro_batching = MicroBatching.from_proto(options.micro_batching)
        try:
            return artifacts.compile(cirh, target, micro_batching)
        except (CompileError, CirhError) as error:
            raise CompileRefused(str(error)) from error

    return compile_step


def notes_of(plan: plan_pb2.Plan) -> list[str]:
    """Returns the notes of a plan for the user, one a line."""
    from appliance.compiler.report.report import micro_batch_notes

    return micro_batch_notes(plan)


def warnings_of(plan: plan_pb2.Plan) -> list[str]:
    """Returns the warnings of a plan for the user, one a line."""
    from appliance.compiler.cost.machine_model import machine_model
    from appliance.compiler.report.builder import make_report
    from appliance.compiler.report.report import micro_batch_warnings

    warnings = micro_batch_warnings(plan)
    if plan.gathered:
        warnings.append(make_report(plan, "", machine_model(cache_root())).gathering.warning())
    return warnings


def report_of(folder: Path, artifact: str) -> str:
    """Returns the page of an artifact's report; empty if there is none."""
    page = folder / artifact / REPORT_PAGE
    return str(page) if page.is_file() else ""
