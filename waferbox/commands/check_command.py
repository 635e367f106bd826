"""`waferbox check`: judges a script before anybody waits for a machine."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from waferbox.commands.html_option import HtmlOption, is_printed, refuse_json_with, write_page
from waferbox.commands.machine_option import MachineName, MachineOption, find_machine
from waferbox.commands.script_command import (
    STANDARD_INPUT,
    ModuleOption,
    NoScript,
    ScriptArgument,
    ScriptArguments,
    command_of,
)
from waferbox.launch.stop_signals import ending_in_order
from waferbox.output.console import Status, errors, fail, output, print_text
from waferbox.output.working import working

WIDTH: Final = 120  # of the verdict, which has sentences


def check(
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    module: ModuleOption = False,
    wafers: Annotated[str, typer.Option(metavar="N,N", help="The numbers of wafers to compile for.")] = "1,2",
    steps: Annotated[int, typer.Option(min=2, max=1000, help="The most steps of each execution.")] = 5,
    full_size: Annotated[
        bool,
        typer.Option("--full-size", metavar="", help="Trace and compile only: the steps are too large to run here."),
    ] = False,
    machine: MachineOption = MachineName.CS3,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="The longest run of the script.")] = 3600.0,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the records and logs of the runs in a new folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the verdict as JSON.")] = False,
    html: HtmlOption = None,
) -> None:
    """Run a script in several ways and say what a cluster would make of it.

    Exits with 0 if nothing was found, with 1 if something was, and with 2 if the script could not be checked.
    """
    with working("loading the compiler"):
        from appliance.compiler.core.progress import progress_shown
        from waferbox.check.check import Check, CheckSettings
        from waferbox.check.page import verdict_page
        from waferbox.check.tables import verdict_text

    try:
        counts = [int(text) for text in wafers.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--wafers: {wafers!r} is no list of numbers such as 1,2,16") from None
    if not counts or min(counts) < 1 or max(counts) > 1 << 16:
        raise typer.BadParameter("--wafers: each number is from 1 to 65536")
    if as_json:
        refuse_json_with(html)
    if script == STANDARD_INPUT:
        fail(
            "a check runs the script several times, and can read standard input once: write it to a file", Status.USAGE
        )
    try:
        command = command_of(script, arguments or [], is_module=module)
    except NoScript as error:
        fail(str(error), Status.USAGE)
    if keep is not None and keep.exists():
        fail(f"{keep} exists; name a new folder with --keep", Status.USAGE)
    folder = Path(tempfile.mkdtemp(prefix="waferbox-check-")) if keep is None else keep.absolute()
    settings = CheckSettings(
        command=command,
        wafers=counts,
        steps=steps,
        full_size=full_size,
        machine=find_machine(machine),
        folder=folder,
        timeout_seconds=timeout,
    )
    with ending_in_order():
        try:
            with working("starting") as work, progress_shown(work.at):
                verdict = Check(settings, work.now).verdict()
        except TimeoutError as error:
            fail(f"{error}: name a longer --timeout, or fewer --steps", Status.USAGE)
        finally:
            if keep is None:
                shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print_text(verdict.to_json())
    else:
        console = errors if is_printed(html) else output
        console.print(verdict_text(verdict), width=min(console.width, WIDTH))
    if html is not None:
        write_page(html, verdict_page(verdict))
    raise typer.Exit(verdict.status)
