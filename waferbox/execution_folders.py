"""The folders of a script's executions, `executors/000001` and so on, each with a record that says what it is.

The client library writes the records; commands read them to find the execution that a user means.
"""

import dataclasses
import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EXECUTIONS: Final = "executors"  # in the artifact folder of a script
RECORD: Final = "execution.json"
CIRH: Final = "cirh.mlir"
REPORT_PAGE: Final = "report.html"  # in the folder of a compile, which lies beside its plan
# The executions in a folder that a user names: in itself, in an artifact folder, in the folder of all artifact folders,
# or in the model folder of a trainer, which contains that.
_WITHIN: Final = ("[0-9]*", f"{EXECUTIONS}/[0-9]*", f"*/{EXECUTIONS}/[0-9]*", f"*/*/{EXECUTIONS}/[0-9]*")


class Stage(enum.StrEnum):
    """What an execution is for."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionRecord:
    """What an execution is, and how its step is compiled.

    Attributes:
        stage: whether it trains, that is, an optimizer steps in it.
        function: the traced function, with its line, such as "training_step (train.py:40)".
        model: the class of the compiled model; empty: none was compiled.
        loader: the input_fn, with its line.
        steps: the steps that the script asks for.
        rows: the rows of a batch, over all wafers.
        num_csx: the wafers among which the batch is divided.
        half: the half type of mixed precision; empty: float32.
        optimization_level: how much is computed in half precision, 0 to 2.
        half_gradients: whether gradients travel in half precision.
        plan: the file of the plan, on the coordinator's host; empty: the step is not compiled.
    """

    stage: Stage
    function: str
    model: str
    loader: str
    steps: int
    rows: int
    num_csx: int
    half: str = ""
    optimization_level: int = 1
    half_gradients: bool = False
    plan: str = ""

    def __str__(self) -> str:
        model = f" of {self.model}" if self.model else ""
        precision = f" in {self.half}" if self.half else ""
        return (
            f"{self.stage}: {self.function}{model}{precision}, {self.steps:,} step{'' if self.steps == 1 else 's'} of "
            f"{self.rows:,} rows from {self.loader}"
        )

    @property
    def report_page(self) -> Path | None:
        """The page of the compile report, on the coordinator's host; None: the step is not compiled."""
        return Path(self.plan).with_suffix("") / REPORT_PAGE if self.plan else None

    def text(self) -> str:
        """Returns the content of the file RECORD."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionFolder:
    """The folder of an execution.

    Attributes:
        path: the folder.
        record: what the execution is; None: it ended before its step was traced, or an earlier version has written it.
    """

    path: Path
    record: ExecutionRecord | None

    def __str__(self) -> str:
        number = self.path.name.lstrip("0") or self.path.name
        return f"execution {number}" + (f", {self.record}" if self.record else "")


def is_execution(folder: Path) -> bool:
    """Whether a folder is that of an execution."""
    return (folder / RECORD).is_file() or (folder / CIRH).is_file()


def read_execution(folder: Path) -> ExecutionFolder:
    """Reads the folder of an execution."""
    path = folder.resolve()  # `latest` is a link
    try:
        fields = json.loads((path / RECORD).read_text(encoding="utf-8"))
        record = ExecutionRecord(**{**fields, "stage": Stage(fields["stage"])})
    except (OSError, ValueError, TypeError, KeyError):
        record = None
    return ExecutionFolder(path=path, record=record)


def find_executions(folder: Path) -> list[ExecutionFolder]:
    """Returns the executions in a folder that a user names, with a traced step, by number; empty: there are none.

    folder: that of an execution, the artifact folder of a script, or a folder with artifact folders, such as the model
        folder of a trainer, of which the newest is taken.
    """
    if is_execution(folder):
        return [read_execution(folder)]
    for within in _WITHIN:
        found = [path for path in folder.glob(within) if path.name.isdecimal() and is_execution(path)]
        if found:
            newest = max(found, key=lambda path: path.stat().st_mtime).parent
            return [read_execution(path) for path in sorted(found) if path.parent == newest]
    return []
