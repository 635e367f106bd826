"""The interpreter of the vendor's client, as a command names it."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import typer

from waferbox.launch.installation import user_environment

_SECONDS: Final = 60.0  # for an environment on a slow disk
# Those that the process of an input_fn imports there itself. They are only looked for: torch takes seconds to import.
_NEEDED: Final = ("dill", "numpy", "torch")
_SHOWN_CHARACTERS: Final = 200

_PROGRAM: Final = """
import importlib.util, json, sys
print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]))
"""


def vendor_python(interpreter: Path) -> str:
    """Returns the absolute path of an interpreter that can run input functions of the vendor's client.

    Raises:
        typer.BadParameter: it is no Python, or lacks a package.
    """
    missing = _missing_packages(interpreter)
    if missing:
        raise typer.BadParameter(
            f"--vendor-client: {interpreter} has no {' and no '.join(missing)}: install the vendor's client there, or "
            "name the Python of its environment, such as vendor/bin/python"
        )
    return os.path.abspath(interpreter)


def _missing_packages(interpreter: Path) -> Sequence[str]:
    named = f"--vendor-client: {interpreter} is no Python that starts"
    remedy = "name the Python of the environment of the vendor's client, such as vendor/bin/python"
    try:
        done = subprocess.run(
            [os.path.abspath(interpreter), "-c", _PROGRAM, *_NEEDED],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=user_environment(os.environ),
            timeout=_SECONDS,
            check=True,
        )
        missing = [str(name) for name in json.loads(done.stdout)]
    except OSError as error:
        raise typer.BadParameter(f"{named} ({error.strerror}): {remedy}") from error
    except subprocess.TimeoutExpired as error:
        raise typer.BadParameter(f"{named} within {_SECONDS:g} s: {remedy}") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
        reason = f"status {error.returncode}" + (f", {said}" if said else "")
        raise typer.BadParameter(f"{named} ({reason}): {remedy}") from error
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(f"{named}: {remedy}") from error
    return missing
