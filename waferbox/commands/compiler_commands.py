"""Commands for the compiler, which need no cluster: `waferbox opt`, `compile-report`, `plan`.

They import the compiler, and so torch, when they are called: other commands start faster without.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from waferbox.output.console import Status, fail, output, print_text
from waferbox.output.tables import passes_table


def opt(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A module in CIRH; - is standard input.")] = "-",
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
    out: Annotated[str, typer.Option("-o", metavar="OUT", help="The file of the result; - is standard output.")] = "-",
    list_passes: Annotated[
        bool, typer.Option("--list", metavar="", help="List the passes in the order of a compile.")
    ] = False,
) -> None:
    """Run passes of the compiler on a module. The exit status is 1 if the text is wrong or a pass fails."""
    from appliance.compiler.pipeline import OptError, descriptions
    from waferbox.commands.opt import make_target, optimise

    if list_passes:
        output.print(passes_table(descriptions()))
        return
    try:
        target = make_target(num_csx, half, optimization_level, half_gradients, strict_sharding)
        optimise(file, [name.strip() for name in passes.split(",") if name.strip()], target, print_after_all, out)
    except OptError as error:
        fail(str(error))


def compile_report(
    artifact: Annotated[
        Path, typer.Argument(metavar="ARTIFACT", help="A .plan file, or a folder of them: the newest.", exists=True)
    ],
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the report as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write the report as a page of HTML.", dir_okay=False)
    ] = None,
) -> None:
    """Show the report of a compile: layers, memory, the predicted step."""
    from appliance.compiler.report.page import report_page
    from waferbox.commands.compile_report import NoArtifact, read_report, report_tables

    try:
        report = read_report(artifact)
        if html is not None:
            html.write_text(report_page(report))
    except (NoArtifact, OSError) as error:
        fail(str(error))
    if as_json:
        print_text(report.to_json())
    elif html is None:
        output.print(report_tables(report))
    else:
        print_text(f"The report is in {html}")


def plan(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A step in CIRH, as scripts write it.", exists=True, dir_okay=False)
    ],
    wafer_rate: Annotated[str, typer.Option(metavar="RATE", help="Arithmetic of a wafer, such as 312Tflop/s.")],
    link: Annotated[
        str, typer.Option(metavar="RATE", help="Network of each role's host, in each direction: 100Gb/s, or 10GB/s.")
    ],
    wafers: Annotated[int, typer.Option(min=1, max=1 << 20, help="Wafers.")] = 1,
    memoryx: Annotated[int, typer.Option(min=1, max=1024, help="Shards of MemoryX.")] = 1,
    divided_over: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Wafers among which the file's batch is divided; each wafer has such a part."
        ),
    ] = None,
    wafer_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of a wafer.")] = "40GB",
    wafer_memory_rate: Annotated[
        str, typer.Option(metavar="RATE", help="Reads and writes of a wafer in element-wise kernels.")
    ] = "20PB/s",
    memoryx_rate: Annotated[
        str, typer.Option(metavar="RATE", help="Reads and writes of a MemoryX shard in updates.")
    ] = "200GB/s",
    swarmx_rate: Annotated[str, typer.Option(metavar="RATE", help="Sums of a SwarmX node.")] = "200GB/s",
    latency: Annotated[str, typer.Option(metavar="TIME", help="Of a frame from thread to thread.")] = "10us",
    frame_time: Annotated[
        str, typer.Option(metavar="TIME", help="Of a thread, for each frame that it sends or receives.")
    ] = "5us",
    half: Annotated[
        str, typer.Option(metavar="TYPE", help="Mixed precision in float16, bfloat16 or cbfloat16. Default: none.")
    ] = "",
    optimization_level: Annotated[int, typer.Option(min=0, max=2, help="How much is computed in half precision.")] = 1,
    half_gradients: Annotated[
        bool, typer.Option("--half-gradients", metavar="", help="Send gradients of weights in half precision too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the prediction as JSON.")] = False,
) -> None:
    """Predict a step on a cluster of any size: its time, its bottleneck, the best SwarmX tree."""
    from waferbox.prediction import quantities
    from waferbox.prediction.prediction import ClusterSizes, PredictionError, predict_clusters
    from waferbox.prediction.simulation import Compute, Rates
    from waferbox.prediction.tables import prediction_data, prediction_tables

    try:
        rates = Rates(
            wafer=Compute(
                flops_per_second=quantities.flops_per_second(wafer_rate),
                bytes_per_second=quantities.bytes_per_second(wafer_memory_rate),
            ),
            memoryx=Compute(bytes_per_second=quantities.bytes_per_second(memoryx_rate)),
            swarmx_bytes_per_second=quantities.bytes_per_second(swarmx_rate),
            link_bytes_per_second=quantities.bytes_per_second(link),
            latency_seconds=quantities.seconds(latency),
            frame_seconds=quantities.seconds(frame_time),
        )
        wanted = ClusterSizes(
            wafers=wafers,
            memoryx=memoryx,
            divided_over=divided_over,
            wafer_memory_bytes=quantities.size_bytes(wafer_memory),
            half=half,
            optimization_level=optimization_level,
            half_gradients=half_gradients,
        )
        prediction = predict_clusters(file, wanted, rates)
    except quantities.QuantityError as error:
        fail(str(error), Status.USAGE)
    except (PredictionError, OSError) as error:
        fail(str(error))
    if as_json:
        print_text(json.dumps(prediction_data(prediction), indent=1))
    else:
        output.print(prediction_tables(prediction))
