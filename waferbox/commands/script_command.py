"""The command that runs what a user names: a script, a module, or a program such as cszoo."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

ScriptArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="A Python script, a folder with __main__.py, or a program like cszoo.")
]
ScriptArguments: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="What the script is given.")
]
ModuleOption: TypeAlias = Annotated[
    bool, typer.Option("-m", "--module", metavar="", help="SCRIPT is a module, as in `python -m`.")
]

STANDARD_INPUT: Final = "-"

_ELF: Final = b"\x7fELF"


class NoScript(ValueError):
    """Raised when a command names neither a file nor a program."""


def command_of(script: str, arguments: Sequence[str], *, is_module: bool = False) -> list[str]:
    """Returns the command that runs a script, a module, or a program.

    Args:
        script: The path of a script, of a folder with `__main__.py` or of a program; "-" for standard input; the name
            of a program, or that of a module.
        arguments: Those of the script.
        is_module: Whether it is a module, as in `python -m`.

    Raises:
        NoScript: There is neither script nor program, or it is a notebook.
    """
    if is_module:
        return [sys.executable, "-m", script, *arguments]
    if not script:
        raise NoScript("the name of the script is empty")
    if Path(script).suffix == ".ipynb":
        raise NoScript(f"{script} is a notebook: export its code first (jupyter nbconvert --to script {script})")
    is_script = Path(script).is_file() and not _is_program(script)
    if is_script or script == STANDARD_INPUT or (Path(script) / "__main__.py").is_file():
        return [sys.executable, script, *arguments]
    program = shutil.which(script)
    if program is None and Path(script).is_dir():
        raise NoScript(f"{script} is a folder without __main__.py, the script that runs it: name the script itself")
    if program is None:
        raise NoScript(f"there is no script {script}, and no program of this name")
    return [program, *arguments]


def _is_program(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_ELF)) == _ELF
