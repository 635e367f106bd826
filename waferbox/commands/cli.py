"""The command `waferbox`: clusters, and jobs on them."""

import os
import sys
from typing import Annotated, Final

import typer

from waferbox import __version__, settings
from waferbox.commands import cluster_commands, compiler_commands, job_commands
from waferbox.commands.check_command import check
from waferbox.commands.cluster_commands import token
from waferbox.commands.get_commands import describe, get, status
from waferbox.commands.kubernetes_command import kubernetes
from waferbox.commands.logs import logs
from waferbox.commands.page import page
from waferbox.commands.plan_command import plan
from waferbox.commands.top import top
from waferbox.commands.trace import trace
from waferbox.output.console import Status, UnwritableOutput, print_error, print_text
from waferbox.security.tls import TlsError
from waferbox.settings import SettingError

CLUSTERS: Final = "Clusters"
JOBS: Final = "Jobs"
COMPILER: Final = "Compiler"

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", metavar="", help="Show the version.")] = False) -> None:
    if version:
        print_text(f"waferbox {__version__}")
        raise typer.Exit


app.command(rich_help_panel=CLUSTERS)(cluster_commands.up)
app.command(rich_help_panel=CLUSTERS, context_settings={"allow_interspersed_args": False})(cluster_commands.run)
app.command(rich_help_panel=CLUSTERS)(status)
app.command(rich_help_panel=CLUSTERS)(cluster_commands.down)
app.command(rich_help_panel=CLUSTERS)(page)
app.command(rich_help_panel=CLUSTERS)(token)
app.command(rich_help_panel=CLUSTERS)(kubernetes)
app.add_typer(get, name="get", rich_help_panel=JOBS)
app.add_typer(describe, name="describe", rich_help_panel=JOBS)
app.command(rich_help_panel=JOBS)(logs)
app.command(rich_help_panel=JOBS)(top)
app.command(rich_help_panel=JOBS)(trace)
app.command(rich_help_panel=JOBS)(job_commands.cancel)
app.command(rich_help_panel=JOBS)(job_commands.label)
app.command("set-priority", rich_help_panel=JOBS)(job_commands.set_priority)
app.command(rich_help_panel=COMPILER, context_settings={"allow_interspersed_args": False})(check)
app.command(rich_help_panel=COMPILER)(compiler_commands.opt)
app.command("compile-report", rich_help_panel=COMPILER)(compiler_commands.compile_report)
app.command(rich_help_panel=COMPILER)(plan)


def run() -> None:
    """Runs the command; a variable with a wrong text or file, or output that cannot be written, ends it with a line."""
    if os.environ.get("COLUMNS") == "0":  # of a console that does not know its width; Rich would print nothing
        del os.environ["COLUMNS"]
    try:
        settings.check()
        app()
    except (SettingError, TlsError) as error:
        print_error(str(error))
        sys.exit(Status.USAGE)
    except UnwritableOutput as error:
        print_error(f"standard output cannot be written: {error}")
        sys.exit(Status.FAILED)
