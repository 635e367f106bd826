"""Commands about the compiler, for which no cluster is needed: `waferbox opt`, `compile-report`.

The compiler, and torch with it, are loaded by them only.
"""

from pathlib import Path
from typing import Annotated

import typer

from waferbox.output.console import fail, output, say
from waferbox.output.tables import passes_table


def opt(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A module in CIRH; - is standard input.")] = "-",
    passes: Annotated[str, typer.Option("--pass", metavar="A,B", help="What to run, in this order; see --list.")] = "",
    print_after_all: Annotated[
        bool,
        typer.Option("--print-after-all", metavar="", help="Print the module after each of them, to standard error."),
    ] = False,
    num_csx: Annotated[int, typer.Option(min=1, help="Wafers over which the work is divided.")] = 1,
    half: Annotated[
        str, typer.Option(metavar="TYPE", help="Mixed precision in float16, bfloat16 or cbfloat16; without it none.")
    ] = "",
    optimization_level: Annotated[int, typer.Option(min=0, max=2, help="How much is computed in half precision.")] = 1,
    out: Annotated[str, typer.Option("-o", metavar="OUT", help="Where the result goes; - is standard output.")] = "-",
    list_passes: Annotated[
        bool, typer.Option("--list", metavar="", help="List the passes in the order of a compile.")
    ] = False,
) -> None:
    """Run passes of the compiler on text. Exits with 1 if the text or a pass is refused."""
    from appliance.compiler.opt import OptError, descriptions
    from waferbox.commands.opt import make_target, optimise

    if list_passes:
        output.print(passes_table(descriptions()))
        return
    try:
        target = make_target(num_csx, half, optimization_level)
        optimise(file, [name.strip() for name in passes.split(",") if name.strip()], target, print_after_all, out)
    except OptError as error:
        fail(str(error))


def compile_report(
    artifact: Annotated[
        Path, typer.Argument(metavar="ARTIFACT", help="A .plan file, or a folder of them: the newest.", exists=True)
    ],
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print it as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write it as a page of HTML.", dir_okay=False)
    ] = None,
) -> None:
    """Show what a compile told: layers, memory, the predicted step."""
    from appliance.compiler.report.page import report_page
    from waferbox.commands.compile_report import NoArtifact, read_report, report_tables

    try:
        report = read_report(artifact)
        if html is not None:
            html.write_text(report_page(report))
    except (NoArtifact, OSError) as error:
        fail(str(error))
    if as_json:
        say(report.to_json())
    elif html is None:
        output.print(report_tables(report))
    else:
        say(f"The report is in {html}")
