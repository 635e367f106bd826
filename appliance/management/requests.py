"""Checks of the requests to management."""

import re
from collections.abc import Iterable, Sequence

from appliance.coordinator.reporting import MAX_RESTARTS
from appliance.management.nodes.job_queue import DEFAULT_PRIORITY, FIRST_PRIORITY, LAST_PRIORITY
from waferbox import roles
from waferbox.limits import MAX_RUN_AHEAD_STEPS, MAX_WAFERS, MAX_WORKERS_PER_WAFER
from wsc.v1 import management_pb2, plan_pb2

DEFAULT_RUN_AHEAD_STEPS = 16
MAX_JOB_NODES = 16_384
MAX_LABELS = 64
MAX_TEXT = 256  # characters of a label, a name or an address
MAX_FOLDER = 4096  # characters of a path
MAX_ARGUMENTS = 256  # of a script's command line
MAX_COMMAND = 8192  # characters of a script's command line
MAX_MESSAGE = 10_000  # characters of a job's message in a report
MAX_ARTIFACTS = 64  # artifacts in a report
MAX_KEYS = 1024  # labels that one call removes

# The texts by which a node describes itself, and those of a node in a coordinator's message.
_OWN_TEXTS = ("address", "host", "version", "job", "member", "metrics", "instance")
_NODE_TEXTS = ("node_id", *_OWN_TEXTS)


def complete(request: management_pb2.CreateJobRequest) -> None:
    """Sets the defaults of fields that the client left out."""
    request.run_ahead_steps = request.run_ahead_steps or DEFAULT_RUN_AHEAD_STEPS
    request.priority = request.priority or DEFAULT_PRIORITY


def is_artifact(name: str) -> bool:
    """Whether this can be the key of a plan, and so the name of a folder in the cache: it comes from a coordinator."""
    return re.fullmatch("[0-9A-Za-z-]{1,128}", name) is not None


def problem_of_job(request: management_pb2.CreateJobRequest) -> str:
    """Returns a problem of a client's request for a job; empty if there is none."""
    for name, value, least, most in (
        ("num_csx", request.num_csx, 1, MAX_WAFERS),
        ("min_num_csx", request.min_num_csx, 0, request.num_csx),
        ("num_workers_per_csx", request.num_workers_per_csx, 1, MAX_WORKERS_PER_WAFER),
        ("run_ahead_steps", request.run_ahead_steps, 0, MAX_RUN_AHEAD_STEPS),
        ("priority", request.priority, 0, LAST_PRIORITY),
    ):
        if not least <= value <= most:
            return f"{name} must be {least} to {most}, not {value}"
    if request.execution_strategy not in plan_pb2.ExecutionStrategy.values():
        return f"there is no execution strategy {request.execution_strategy}"
    if len(request.compile_dir) > MAX_FOLDER:
        return f"compile_dir must have at most {MAX_FOLDER} characters, not {len(request.compile_dir)}"
    if max(len(request.user), len(request.host)) > MAX_TEXT:
        return f"the names of user and host must have at most {MAX_TEXT} characters"
    if len(request.command) > MAX_ARGUMENTS or sum(map(len, request.command)) > MAX_COMMAND:
        return f"command has at most {MAX_ARGUMENTS} arguments, and {MAX_COMMAND} characters"
    return problem_of_labels(request.labels)


def problem_of_node(hello: management_pb2.RegisterRequest) -> str:
    """Returns a problem of a node's hello; empty if there is none."""
    if not roles.is_registered(hello.role):
        return f"there is no role {hello.role}"
    if not hello.address:
        return "a node must say at which address it listens"
    for name in _OWN_TEXTS:
        if len(getattr(hello, name)) > MAX_TEXT:
            return f"{name} must have at most {MAX_TEXT} characters, not {len(getattr(hello, name))}"
    return ""


def problem_of_acquire(wanted: management_pb2.Acquire) -> str:
    """Returns a problem of a coordinator's request for nodes; empty if there is none."""
    for name, value, least, most in (
        ("num_wafers", wanted.num_wafers, 1, MAX_WAFERS),
        ("num_workers_per_wafer", wanted.num_workers_per_wafer, 1, MAX_WORKERS_PER_WAFER),
    ):
        if not least <= value <= most:
            return f"{name} must be {least} to {most}, not {value}"
    if not set(wanted.bound) <= {node.member for node in wanted.former}:
        return "bound names former members"
    return problem_of_nodes(wanted.former)


def problem_of_nodes(nodes: Sequence[management_pb2.NodeInfo]) -> str:
    """Returns a problem of a coordinator's list of nodes; empty if there is none."""
    if len(nodes) > MAX_JOB_NODES:
        return f"a job has at most {MAX_JOB_NODES} nodes, not {len(nodes)}"
    if len({node.member for node in nodes}) < len(nodes):
        return "no two nodes of a job have the same name"
    for node in nodes:
        if not roles.is_registered(node.role):
            return f"there is no role {node.role}"
        if not node.member or not node.address:
            return "a node of a job has a name in it, and an address"
        if max(len(getattr(node, name)) for name in _NODE_TEXTS) > MAX_TEXT:
            return f"no text that describes a node has more than {MAX_TEXT} characters"
    return ""


def problem_of_report(report: management_pb2.JobReport) -> str:
    """Returns a problem of a coordinator's report; empty if there is none. Cuts a message that is too long."""
    report.message = report.message[:MAX_MESSAGE]
    if len(report.artifacts) > MAX_ARTIFACTS or max(map(len, report.artifacts), default=0) > MAX_TEXT:
        return f"a job names at most {MAX_ARTIFACTS} artifacts, each with at most {MAX_TEXT} characters"
    if len(report.restarts) > MAX_RESTARTS:
        return f"a report has at most the last {MAX_RESTARTS} restarts, not of {len(report.restarts)}"
    for restart in report.restarts:
        restart.cause, restart.replaced = restart.cause[:MAX_MESSAGE], restart.replaced[:MAX_MESSAGE]
    return ""


def problem_of_priority(priority: int) -> str:
    """Returns a problem of a priority; empty if there is none."""
    if FIRST_PRIORITY <= priority <= LAST_PRIORITY:
        return ""
    return f"priority must be {FIRST_PRIORITY} (first) to {LAST_PRIORITY}, not {priority}"


def shown(text: str) -> str:
    """Quotes a text from outside for an error message, and cuts it at the length of the longest valid one."""
    return repr(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}...")


def problem_of_labels(labels: Iterable[str]) -> str:
    """Returns a problem of a job's labels; empty if there is none."""
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
