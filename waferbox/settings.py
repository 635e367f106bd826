"""Every environment variable of Waferbox: its type, its default, its meaning, and the processes that read it.

`python docs/settings.py` writes docs/settings.md from this table. A module reads a variable as `settings.LANE.get()`,
and takes its name for another process from `settings.LANE.name`. An empty text is the same as no text.

waferbox/input_process may run under an interpreter without Waferbox, and so writes the names of its variables itself;
tests/waferbox/test_settings.py compares them with this table.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from waferbox.limits import MAX_RESTARTS, MAX_RUN_AHEAD_STEPS, MAX_WAFERS

T_co = TypeVar("T_co", covariant=True)


class SettingError(ValueError):
    """Raised where an environment variable has a wrong text, or names a file that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(Generic[T_co]):
    """The form of a variable's text.

    text: names the form, after the words "must be".
    parse: converts the text to the value. It raises ValueError, whose message is not used, for a text of another form.
    """

    text: str
    parse: Callable[[str], T_co]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable(Generic[T_co]):
    """An environment variable.

    form: the form of its text.
    default: its value where the environment has no text for it.
    default_text: describes the default in Markdown; empty: the default itself does.
    meaning: a sentence or two, in Markdown.
    readers: the processes that read it.
    is_internal: whether one process of Waferbox sets it for another, and users never set it.
    is_withheld: whether the process of a user's input_fn does not get it.
    """

    name: str
    form: Form[T_co]
    default: T_co
    default_text: str = ""
    meaning: str
    readers: str
    is_internal: bool = False
    is_withheld: bool = False

    def get(self) -> T_co:
        """Returns the value in the environment of this process.

        Raises:
            SettingError: the text has another form; the message names the variable, the text and the right form.
        """
        text = os.environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.form.parse(text)
        except ValueError:
            raise SettingError(f"the environment variable {self.name} must be {self.form.text}, not {text!r}") from None

    def is_set(self) -> bool:
        """Whether the environment of this process has a text for the variable."""
        return bool(os.environ.get(self.name))


# --- Forms ------------------------------------------------------------------------------------------------------------


def _whole_number(least: int, most: int | None = None) -> Form[int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least or (most is not None and int(text) > most):
            raise ValueError(text)
        return int(text)

    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Form(text=f"a number {limits}", parse=parse)


def _one_of(*names: str) -> Form[str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return Form(text=f"{', '.join(names[:-1])} or {names[-1]}", parse=parse)


def _seconds(most: int, *, is_positive: bool = False) -> Form[float]:
    def parse(text: str) -> float:
        seconds = float(text)
        if not 0 <= seconds <= most or (is_positive and not seconds):  # The comparison is false for NaN too.
            raise ValueError(text)
        return seconds

    limits = f"greater than 0 and at most {most}" if is_positive else f"from 0 to {most}"
    return Form(text=f"a number of seconds {limits}", parse=parse)


def _log_level(text: str) -> int:
    level = logging.getLevelNamesMapping().get(text.upper())
    if level is None:
        raise ValueError(text)
    return level


# Some waits of Python and of the system raise OverflowError for longer times. This one is some 30 years.
_MAX_SECONDS: Final = 1_000_000_000
# gRPC takes milliseconds in 32 bits, and waits 5/3 of the time for an answer.
_MAX_KEEPALIVE_SECONDS: Final = 1_000_000
_FOLDER: Final = Form(text="the path of a folder", parse=lambda text: Path(text).absolute())
_PATH: Final = Form(text="a path", parse=Path)
# Every text is a token, so that no error message has one.
_TOKEN: Final = Form(text="a token", parse=str.strip)
_IS_ONE: Final = Form(text="1, or anything else for no", parse=lambda text: text == "1")

# --- Which cluster, and by which right --------------------------------------------------------------------------------

MANAGEMENT: Final[Variable[str]] = Variable(
    name="WAFERBOX_MANAGEMENT",
    form=Form(text="an address such as 127.0.0.1:9000", parse=str),
    default="",
    default_text="the current context of the file that `CSCONFIG_PATH` names; else the cluster of `waferbox up` on "
    "this machine; else scripts start a cluster of their own, which commands find",
    meaning="The address of the management service, `host:port`, where `mgmt_address` or `--management` is not given; "
    "or the name of a cluster of this machine, as in `waferbox get clusters`; or `embedded`, for a script's own.",
    readers="scripts, commands",
)
TOKEN: Final[Variable[str]] = Variable(
    name="WAFERBOX_TOKEN",
    form=_TOKEN,
    default="",
    default_text="that of `WAFERBOX_TOKEN_FILE`",
    meaning="The token of a script or a command for the cluster; `waferbox token` prints one.",
    readers="scripts, commands",
    is_withheld=True,
)
TOKEN_FILE: Final[Variable[Path | None]] = Variable(
    name="WAFERBOX_TOKEN_FILE",
    form=_PATH,
    default=None,
    default_text="a token made of this user's own secret, for clusters of this machine alone",
    meaning="A file with the token, where `WAFERBOX_TOKEN` is not set.",
    readers="scripts, commands",
    is_withheld=True,
)
TLS_DIR: Final[Variable[Path | None]] = Variable(
    name="WAFERBOX_TLS_DIR",
    form=_PATH,
    default=None,
    default_text="no TLS",
    meaning="The folder with `authority.pem` and the process's own `node.pem` or `client.pem`.",
    readers="all processes of a cluster, scripts, commands",
    is_withheld=True,
)
SECRET_FILE: Final[Variable[Path | None]] = Variable(
    name="WAFERBOX_SECRET_FILE",
    form=_PATH,
    default=None,
    default_text="`cluster.key` in the cache folder, or in the folder for temporary files",
    meaning="The file with the secret that all processes of a cluster share; it is made where there is none.",
    readers="all processes of a cluster; scripts and commands on the same machine",
    is_withheld=True,
)

# --- Folders ----------------------------------------------------------------------------------------------------------

CACHE: Final[Variable[Path | None]] = Variable(
    name="WAFERBOX_CACHE",
    form=_FOLDER,
    default=None,
    default_text="`waferbox` in `XDG_CACHE_HOME`, else in `~/.cache`; without a home a temporary folder",
    meaning="The cache folder: compiled artifacts and kernels, the cluster's secret, records of jobs, finished jobs.",
    readers="all processes of a cluster, scripts, commands",
)
RECOVERY_DIR: Final[Variable[Path | None]] = Variable(
    name="WAFERBOX_RECOVERY_DIR",
    form=_FOLDER,
    default=None,
    default_text="`recovery` in the cache folder",
    meaning="The folder of recovery points: one folder for each job, and in it one for each state keeper.",
    readers="MemoryX; wafers, for layer pipelined mode",
)
SOCKETS: Final[Variable[Path | None]] = Variable(
    name="WAFERBOX_SOCKETS",
    form=_PATH,
    default=None,
    default_text="names without a file, which one container's processes share",
    meaning="A folder for Unix sockets that all containers of a host mount, so that links between them use shared "
    "memory. It must belong to the user of the process, with mode 0700.",
    readers="all nodes, coordinators, scripts",
)

# --- Processes of a cluster -------------------------------------------------------------------------------------------

LOG_LEVEL: Final[Variable[int]] = Variable(
    name="WAFERBOX_LOG_LEVEL",
    form=Form(text="one of debug, info, warning, error and critical", parse=_log_level),
    default=logging.INFO,
    default_text="info; warning where a script or `waferbox up` starts the process",
    meaning="The least level of records on standard error. The log of a job has all records from info.",
    readers="all processes of a cluster",
)
HANG_SECONDS: Final[Variable[float]] = Variable(
    name="WAFERBOX_HANG_SECONDS",
    form=_seconds(_MAX_SECONDS, is_positive=True),
    default=60.0,
    meaning="How long a node may be busy with one kernel, copy or send before its execution is taken to hang; a third "
    "of it where the process computes nothing meanwhile.",
    readers="all nodes, coordinators, launchers",
)
KEEPALIVE_SECONDS: Final[Variable[float]] = Variable(
    name="WAFERBOX_KEEPALIVE_SECONDS",
    form=_seconds(_MAX_KEEPALIVE_SECONDS, is_positive=True),
    default=3.0,
    meaning="A gRPC peer that is silent for so long gets a ping, and is given up when it does not answer within 5/3 of "
    "this time.",
    readers="all processes of a cluster, scripts, commands",
)
RECOVERY_SECONDS: Final[Variable[float]] = Variable(
    name="WAFERBOX_RECOVERY_SECONDS",
    form=_seconds(_MAX_SECONDS),
    default=30.0,
    meaning="The time from one recovery point of a job to the next.",
    readers="coordinators",
)
REPLACEMENT_SECONDS: Final[Variable[float]] = Variable(
    name="WAFERBOX_REPLACEMENT_SECONDS",
    form=_seconds(_MAX_SECONDS),
    default=60.0,
    default_text="60; 180 with `waferbox up --engine ray`",
    meaning="How long a job waits for nodes in place of those that died, before it continues with fewer wafers, or "
    "fails.",
    readers="coordinators",
)
IDLE_SECONDS: Final[Variable[float]] = Variable(
    name="WAFERBOX_IDLE_SECONDS",
    form=_seconds(_MAX_SECONDS),
    default=300.0,
    meaning="How long a job may be without an execution and keep its nodes while other jobs wait for them. It gets "
    "nodes again when it needs some.",
    readers="management",
)
INPUT_USER: Final[Variable[str]] = Variable(
    name="WAFERBOX_INPUT_USER",
    form=Form(text="the name of a user", parse=str),
    default="",
    default_text="the worker's own user",
    meaning="The user under which the processes of input functions run. The worker must run as root.",
    readers="workers",
    is_withheld=True,
)

# --- What a job asks for ----------------------------------------------------------------------------------------------

LANE: Final[Variable[str]] = Variable(
    name="WAFERBOX_LANE",
    form=_one_of("auto", "shared_memory", "grpc"),
    default="auto",
    meaning="The default of `ClusterConfig.lane`: how links between processes of one host travel.",
    readers="scripts",
)
RUN_AHEAD_STEPS: Final[Variable[int]] = Variable(
    name="WAFERBOX_RUN_AHEAD_STEPS",
    form=_whole_number(1, MAX_RUN_AHEAD_STEPS),
    default=16,
    meaning="The default of `ClusterConfig.run_ahead_steps`: how many steps with outputs may wait for the script.",
    readers="scripts",
)
EXECUTION_STRATEGY: Final[Variable[str]] = Variable(
    name="WAFERBOX_EXECUTION_STRATEGY",
    form=_one_of("weight_streaming", "pipeline"),
    default="weight_streaming",
    meaning="The default of `cstorch.backends.csx.performance.execution_strategy`.",
    readers="scripts",
)
STRICT_SHARDING: Final[Variable[bool]] = Variable(
    name="WAFERBOX_STRICT_SHARDING",
    form=_IS_ONE,
    default=False,
    default_text="a warning",
    meaning="The default of `cstorch.backends.csx.performance.strict_sharding`: with 1, a step that gathers rows of "
    "all wafers is refused.",
    readers="scripts",
)
MAX_NUM_RESTARTS: Final[Variable[int]] = Variable(
    name="WAFERBOX_MAX_NUM_RESTARTS",
    form=_whole_number(0, MAX_RESTARTS),
    default=3,
    meaning="The default of `cstorch.backends.csx.cluster.max_num_restarts`: deaths in a row, without a new recovery "
    "point, after which a job continues. With 0 the first death ends it.",
    readers="scripts",
)
MIN_NUM_CSX: Final[Variable[int | None]] = Variable(
    name="WAFERBOX_MIN_NUM_CSX",
    form=_whole_number(1, MAX_WAFERS),
    default=None,
    default_text="`num_csx`",
    meaning="The default of `cstorch.backends.csx.cluster.min_num_csx`: the number of wafers with which a job still "
    "continues after a death.",
    readers="scripts",
)
STRICT: Final[Variable[bool]] = Variable(
    name="WAFERBOX_STRICT",
    form=_IS_ONE,
    default=False,
    default_text="warnings",
    meaning="With 1, a warning that a later call of the traced function would be another program is an error.",
    readers="scripts",
)
TRACEBACK: Final[Variable[bool]] = Variable(
    name="WAFERBOX_TRACEBACK",
    form=Form(text="full, or anything else for short ones", parse=lambda text: text == "full"),
    default=False,
    default_text="short",
    meaning="With `full`, the traceback of an uncaught error has the frames inside of Waferbox and torch too.",
    readers="scripts",
)

# --- Passed from process to process -----------------------------------------------------------------------------------

FORK_SERVER: Final[Variable[str]] = Variable(
    name="WAFERBOX_FORK_SERVER",
    form=Form(text="the name of a socket", parse=str),
    default="",
    default_text="processes are started as a Python of their own",
    meaning="The name of the abstract Unix socket of the launcher's fork server.",
    readers="from a launcher to every process that starts others",
    is_internal=True,
    is_withheld=True,
)
RESTART: Final[Variable[int]] = Variable(
    name="WAFERBOX_RESTART",
    form=_whole_number(0),
    default=0,
    meaning="The number of the restart of a script, 0 at first.",
    readers="from `waferbox run --restarts` to the script, which may read it",
    is_internal=True,
)
INPUT: Final[Variable[str]] = Variable(
    name="WAFERBOX_INPUT",
    form=Form(text="a JSON object", parse=str),
    default="",
    default_text="the process streams no input",
    meaning="The place of the worker among those of the job, and the number formats that the script has chosen.",
    readers="from a worker to the process of its input_fn",
    is_internal=True,
)
WORKER_STATE: Final[Variable[str]] = Variable(
    name="WAFERBOX_WORKER_STATE",
    form=Form(text="a JSON object with the fields of `DataLoaderCheckpoint`", parse=str),
    default="",
    default_text="not set outside of a call of `state_dict`",
    meaning="How far the worker has streamed, while its loader's `state_dict` is called.",
    readers="within the process of an input_fn, to `cstorch.distributed.get_worker_state`",
    is_internal=True,
)

CHECK: Final[Variable[str]] = Variable(
    name="WAFERBOX_CHECK",
    form=Form(text="a JSON object", parse=str),
    default="",
    default_text="an ordinary run",
    meaning="How the script runs for a check, and the folder of the record.",
    readers="from `waferbox check` to the script",
    is_internal=True,
)

VARIABLES: Final[Sequence[Variable[object]]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Variable)
)


def check() -> None:
    """Checks the texts of all variables, before processes start that read them. Raises SettingError as Variable.get."""
    for variable in VARIABLES:
        variable.get()
