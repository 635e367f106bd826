"""Finds the step that an argument of a command means: an execution of a script, a compile, a job, or a file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from waferbox.commands.connection import connect, find_job
from waferbox.execution_folders import CIRH, ExecutionFolder, ExecutionRecord, Stage, find_executions
from waferbox.output.console import Status, errors, fail
from waferbox.output.working import working

SOURCE_HELP: Final = (
    "An artifact folder (cerebras_logs, or a trainer's model folder), an execution's folder in it, a .plan file or a "
    "folder of them, a job of a cluster, or a file in CIRH."
)
ExecutionOption = Annotated[
    str | None,
    typer.Option(
        "--execution",
        metavar="N|train|eval",
        help=r"The execution of an artifact folder.  \[default: the last that trains, else the last]",
    ),
]
_PLAN: Final = ".plan"
_JOB: Final = re.compile("(job-)?[0-9a-f]+")  # a job's name, or its begin
_MOST_NAMED: Final = 4  # executions of a folder, in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSource:
    """The step that is meant.

    Attributes:
        name: what it is, for a message.
        text: the file with the step as CIRH; None: there is none.
        plan: the file of its plan; None: it is not compiled, or elsewhere.
        record: what the execution is; None: it is not known.
    """

    name: str
    text: Path | None = None
    plan: Path | None = None
    record: ExecutionRecord | None = None


def find_source(argument: str, execution: str | None, management: str | None) -> StepSource:
    """Returns the step that an argument means. If there are several, says which one is taken; ends the command if none.

    Args:
        argument: a path, or the name of a job.
        execution: the number or the stage of an execution, if the path is an artifact folder; None: the one that is
            meant most often.
        management: address of the management service, for a job; None: the only cluster of this machine.
    """
    path = Path(argument)
    if not argument or (not path.exists() and not _JOB.fullmatch(argument)):
        fail(f"there is no file or folder {argument or repr(argument)}", Status.USAGE)
    if path.is_file() and path.suffix in (".py", ".ipynb"):
        fail(f"{argument} is a script: run it, then name {SOURCE_HELP[0].lower()}{SOURCE_HELP[1:]}", Status.USAGE)
    executions = find_executions(path) if path.is_dir() else []
    if executions:
        return _execution_source(argument, executions, execution)
    if execution is not None:
        fail(f"--execution names an execution in an artifact folder, and {argument} is none", Status.USAGE)
    if not path.exists():
        return _job_source(argument, management)
    if path.is_file():
        is_plan = path.suffix == _PLAN
        return StepSource(name=argument, text=None if is_plan else path, plan=path if is_plan else None)
    plans = _plans_of(path)
    if not plans:
        fail(f"{argument} is no artifact and contains none: name {SOURCE_HELP[0].lower()}{SOURCE_HELP[1:]}")
    return StepSource(name=_taken(plans[-1].stem, len(plans), "the newest"), plan=plans[-1])


def _execution_source(argument: str, executions: Sequence[ExecutionFolder], wanted: str | None) -> StepSource:
    if wanted is None:
        training = [each for each in executions if each.record is not None and each.record.stage is Stage.TRAIN]
        chosen = (training or executions)[-1]
    else:
        found = [each for each in executions if _is_named(each, wanted)]
        if not found:
            fail(f"{argument} has no execution {wanted!r}: it has {'; '.join(_listed(executions))}", Status.USAGE)
        chosen = found[-1]
    name = str(chosen)
    lines = [f"{name[0].upper()}{name[1:]}", f"  in {chosen.path}"]
    others = [each for each in executions if each is not chosen]
    if others:
        lines += [*(f"  not {text}" for text in _listed(others)), "  (--execution names another)"]
    errors.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    record, text = chosen.record, chosen.path / CIRH
    plan = Path(record.plan) if record is not None and record.plan else None
    return StepSource(
        name=name,
        text=text if text.is_file() else None,
        plan=plan if plan is not None and plan.is_file() else None,
        record=record,
    )


def _listed(executions: Sequence[ExecutionFolder]) -> list[str]:
    """The last executions as texts, behind the number of those before."""
    shown = executions[-_MOST_NAMED:]
    before = len(executions) - len(shown)
    return [*([f"{before} earlier ones"] if before else []), *map(str, shown)]


def _is_named(execution: ExecutionFolder, wanted: str) -> bool:
    if wanted.isdecimal():
        return int(execution.path.name) == int(wanted)
    return execution.record is not None and execution.record.stage == wanted


def _plans_of(folder: Path) -> list[Path]:
    """The plans of a compile's folder, which lies beside its plan, or of a folder of plans; the newest last."""
    folder = folder.absolute()  # "." has no name
    beside = folder.parent / f"{folder.name}{_PLAN}"
    if beside.is_file():
        return [beside]
    return sorted(folder.glob(f"*{_PLAN}"), key=lambda plan: plan.stat().st_mtime)


def _job_source(name: str, management: str | None) -> StepSource:
    with connect(management) as cluster:
        job = find_job(cluster.jobs(), name)
        with cluster.answering():
            artifacts = list(cluster.job(job.job).artifacts)
    plans = [plan for artifact in artifacts for plan in _plans_of(Path(artifact))]
    if not plans:
        where = f"they are on the cluster's host: {', '.join(artifacts)}" if artifacts else "it has compiled none yet"
        fail(f"no plan of {job.job} can be read here: {where}")
    # The last is often an evaluation's, which sends no gradients.
    with working(f"reading the plans of {job.job}"):
        chosen = max(reversed(plans), key=_gradient_bytes)
    return StepSource(name=_taken(f"{job.job}: {chosen.stem}", len(plans), "with the most gradients"), plan=chosen)


def _gradient_bytes(plan: Path) -> int:
    """The bytes of gradients that a wafer sends in a step of a plan."""
    from appliance.compiler.artifacts import read_plan

    read = read_plan(plan)
    return 0 if read is None else read.wafer.arena.nbytes


def _taken(name: str, count: int, which: str) -> str:
    """Says which of several plans is taken, and returns its name."""
    if count > 1:
        errors.print(f"{name} is taken, {which} of {count} plans", markup=False, highlight=False, soft_wrap=True)
    return name
