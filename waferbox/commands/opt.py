"""`waferbox opt`: passes of the compiler on text, as `mlir-opt` runs them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from appliance.compiler.core.progress import progress_shown
from appliance.compiler.core.target import Precision, Target
from appliance.compiler.pipeline import OptError, run_passes
from waferbox.cirh.text.scanner import MAXIMUM_TEXT
from waferbox.output.console import printable
from waferbox.output.working import working


def make_target(
    num_csx: int, half: str, optimization_level: int, half_gradients: bool, strict_sharding: bool
) -> Target:
    """The cluster for which passes divide the work.

    Args:
        num_csx: the number of wafers.
        half: the type of mixed precision; empty: float32 throughout.
        optimization_level: of mixed precision, 0 to 2.
        half_gradients: whether gradients of weights are sent in half precision.
        strict_sharding: whether a step is refused that gathers rows of all wafers.

    Raises:
        OptError: there is no such type, or half_gradients needs one.
    """
    try:
        precision = Precision.of_options(half, optimization_level, half_gradients)
    except ValueError as error:
        raise OptError(str(error)) from error
    return Target(num_csx=num_csx, num_shards=1, precision=precision, strict_sharding=strict_sharding)


def optimise(file: str, names: list[str], target: Target, print_after_all: bool, out: str) -> None:
    """Reads a module, runs passes on it and writes it; "-" is standard input and output.

    Raises:
        OptError: the text or a pass is refused. The message can be shown on a terminal.
    """
    shown = "<stdin>" if file == "-" else file
    try:
        text = _read(file)
        with nullcontext() if print_after_all else _progress_shown():
            made = run_passes(text, shown, names, target, _show if print_after_all else None)
        if out == "-":
            sys.stdout.write(made)
        else:
            Path(out).write_text(made)
    except UnicodeDecodeError as error:
        raise OptError(f"{shown}: not a text: {error}") from error
    except (OptError, OSError) as error:
        # The message may quote control characters of the text.
        raise OptError(printable(str(error))) from error


@contextmanager
def _progress_shown() -> Iterator[None]:
    with working("running the passes") as work, progress_shown(work.at):
        yield


def _read(file: str) -> str:
    limit = MAXIMUM_TEXT + 1
    if file == "-":
        return sys.stdin.buffer.read(limit).decode()
    with open(file, "rb") as stream:
        return stream.read(limit).decode()


def _show(name: str, text: str) -> None:
    sys.stderr.write(f"// -----// IR Dump After {name} //----- //\n{text}\n")
