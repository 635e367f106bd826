"""What management accepts of what clients ask for."""

import re
from collections.abc import Iterable
from pathlib import Path

from appliance.management.job_queue import DEFAULT_PRIORITY, FIRST_PRIORITY, LAST_PRIORITY
from wsc.v1 import management_pb2

MAX_WAFERS = 1024
MAX_WORKERS_PER_WAFER = 256
MAX_RUN_AHEAD_STEPS = 100_000
DEFAULT_RUN_AHEAD_STEPS = 16
MAX_LABELS = 64
MAX_TEXT = 256  # characters of a label, or a name


def complete(request: management_pb2.CreateJobRequest) -> None:
    """Fill in what the client left to us."""
    request.run_ahead_steps = request.run_ahead_steps or DEFAULT_RUN_AHEAD_STEPS
    request.priority = request.priority or DEFAULT_PRIORITY


def is_artifact(name: str) -> bool:
    """Whether it can be the key of a plan, and so the name of a folder in the cache: it comes from a coordinator."""
    return re.fullmatch("[0-9A-Za-z-]{1,128}", name) is not None


def problem_of_job(request: management_pb2.CreateJobRequest) -> str:
    """What is wrong with what a client asks for; empty if nothing is."""
    for name, value, least, most in (
        ("num_csx", request.num_csx, 1, MAX_WAFERS),
        ("num_workers_per_csx", request.num_workers_per_csx, 1, MAX_WORKERS_PER_WAFER),
        ("run_ahead_steps", request.run_ahead_steps, 0, MAX_RUN_AHEAD_STEPS),
        ("priority", request.priority, 0, LAST_PRIORITY),
    ):
        if not least <= value <= most:
            return f"{name} must be {least} to {most}, not {value}"
    if ".." in Path(request.compile_dir).parts:
        return f"compile_dir must not contain '..': {request.compile_dir!r}"
    if "\0" in request.compile_dir:
        return "compile_dir must not contain a null character"
    if max(len(request.user), len(request.host)) > MAX_TEXT:
        return f"the names of user and host must have at most {MAX_TEXT} characters"
    return problem_of_labels(request.labels)


def problem_of_priority(priority: int) -> str:
    """As problem_of_job."""
    if FIRST_PRIORITY <= priority <= LAST_PRIORITY:
        return ""
    return f"priority must be {FIRST_PRIORITY} (first) to {LAST_PRIORITY}, not {priority}"


def problem_of_labels(labels: Iterable[str]) -> str:
    """As problem_of_job."""
    labels = list(labels)
    if len(labels) > MAX_LABELS:
        return f"a job has at most {MAX_LABELS} labels, not {len(labels)}"
    for label in labels:
        key, separator, _ = label.partition("=")
        if not key or not separator or len(label) > MAX_TEXT or any(character.isspace() for character in label):
            return (
                f"a label looks like key=value, without spaces, at most {MAX_TEXT} characters, not {label[:MAX_TEXT]!r}"
            )
    return ""
