"""Commands for the compiler, which need no cluster: `waferbox opt`, `compile-report`.

They import the compiler, and so torch, when they are called: other commands start faster without.
"""

from pathlib import Path
from typing import Annotated

import typer

from waferbox.commands.connection import ManagementOption
from waferbox.commands.html_option import HtmlOption, is_printed, refuse_json_with, write_page
from waferbox.commands.step_source import SOURCE_HELP, ExecutionOption, find_source
from waferbox.output.console import Status, fail, output, print_text
from waferbox.output.tables import passes_table
from waferbox.output.working import working


def opt(
    file: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A module in CIRH, or an artifact folder; - is standard input.")
    ] = "-",
    passes: Annotated[str, typer.Option("--pass", metavar="A,B", help="The passes, in this order; see --list.")] = "",
    print_after_all: Annotated[
        bool,
        typer.Option("--print-after-all", metavar="", help="Print the module after each pass, to standard error."),
    ] = False,
    num_csx: Annotated[int, typer.Option(min=1, help="Wafers over which the work is divided.")] = 1,
    half: Annotated[
        str, typer.Option(metavar="TYPE", help="Mixed precision in float16, bfloat16 or cbfloat16. Default: none.")
    ] = "",
    optimization_level: Annotated[int, typer.Option(min=0, max=2, help="How much is computed in half precision.")] = 1,
    half_gradients: Annotated[
        bool, typer.Option("--half-gradients", metavar="", help="Send gradients of weights in half precision too.")
    ] = False,
    strict_sharding: Annotated[
        bool,
        typer.Option("--strict-sharding", metavar="", help="Refuse a step that gathers rows of all wafers."),
    ] = False,
    execution: ExecutionOption = None,
    out: Annotated[str, typer.Option("-o", metavar="OUT", help="The file of the result; - is standard output.")] = "-",
    list_passes: Annotated[
        bool, typer.Option("--list", metavar="", help="List the passes in the order of a compile.")
    ] = False,
) -> None:
    """Run passes of the compiler on a module. The exit status is 1 if the text is wrong or a pass fails."""
    with working("loading the compiler"):
        from appliance.compiler.pipeline import OptError, descriptions
        from waferbox.commands.opt import make_target, optimise

    if list_passes:
        output.print(passes_table(descriptions()))
        return
    if file != "-" and not (file and Path(file).exists()):
        fail(f"there is no file or folder {file or repr(file)}", Status.USAGE)
    if Path(file).is_dir() or execution is not None:
        found = find_source(file, execution, None)
        if found.text is None:
            fail(f"{found.name} has no step in CIRH")
        file = str(found.text)
    try:
        target = make_target(num_csx, half, optimization_level, half_gradients, strict_sharding)
        optimise(file, [name.strip() for name in passes.split(",") if name.strip()], target, print_after_all, out)
    except OptError as error:
        fail(str(error))


def compile_report(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    execution: ExecutionOption = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the report as JSON.")] = False,
    html: HtmlOption = None,
    management: ManagementOption = None,
) -> None:
    """Show the report of a compile: layers, memory, the predicted step."""
    if as_json:
        refuse_json_with(html)
    with working("loading the compiler"):
        from appliance.compiler.report.page import report_page
        from waferbox.commands.compile_report import NoArtifact, read_report, report_tables

    found = find_source(source, execution, management)
    if found.plan is None:
        fail(f"{found.name} has no plan here: compile the step, with compile_only if nothing is to run")
    try:
        with working("making the report"):
            report = read_report(found.plan)
    except NoArtifact as error:
        fail(str(error))
    if html is not None:
        write_page(html, report_page(report))
    if as_json:
        print_text(report.to_json())
    elif html is None:
        output.print(report_tables(report))
    elif not is_printed(html):
        print_text(f"The report is in {html}")
